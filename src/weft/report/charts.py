"""Draws the curves of every job over its steps, and collects all figures of a run.

The number of points is capped, so a week of training makes a page as light as a minute of it.
"""

from __future__ import annotations

from typing import Any

from weft.objectives.metrics import is_share
from weft.report.figure import PlotlyFigure, bare_figure, faint, graph_objects, job_colours, label
from weft.report.run_data import RunData
from weft.report.series import Points, rounded, smooth, thin
from weft.report.time_charts import fill, throughput, timeline

MAX_POINTS = 12_000
"""Points of one curve per job, summed over the jobs: about 200 kB of the page."""
MAX_POINTS_PER_JOB = 600
MIN_POINTS_PER_JOB = 40
CROWDED_FROM = 8
"""With more jobs than this the faint lines get fainter."""
FEW_STEPS = 8
SMOOTHED_FROM = 20
"""Shorter curves are not smoothed."""


def own_metrics(run: RunData) -> dict[str, str]:
    """Names of the metrics that only some objectives have, by the ids of their charts, in order of appearance."""
    result = [point.further for job in run.jobs for point in job.train]
    result += [point.further for job in run.jobs for point in job.evals]
    names = dict.fromkeys(name for further in result for name in further)
    return {f"own_{index}": name for index, name in enumerate(names)}


def draw_charts(run: RunData) -> dict[str, PlotlyFigure]:
    """All figures the run has data for, by chart id."""
    drawn = {
        "loss": _loss(run),
        "eval_loss": _eval_loss(run),
        "token_accuracy": _token_accuracy(run),
        **{chart: _own_metric(run, name) for chart, name in own_metrics(run).items()},
        "learning_rate": _learning_rate(run),
        "grad_norm": _grad_norm(run),
        "throughput": throughput(run),
        "fill": fill(run),
        "timeline": timeline(run),
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def _loss(run: RunData) -> PlotlyFigure | None:
    """The loss of every job, and a cross where one failed."""
    curves: list[Points] = [[(p.step, p.loss) for p in job.train] for job in run.jobs]
    traces = _noisy(run, curves, hover="%{y:.4f}", width=2.2)
    for index, job in enumerate(run.jobs):
        if job.state == "failed" and job.final_loss is not None:
            traces.append(_cross(run, index, _clear(curves[index])))
    return _over_steps(run, traces)


def _eval_loss(run: RunData) -> PlotlyFigure | None:
    traces = []
    for index, job in enumerate(run.jobs):
        points: Points = [(p.step, p.eval_loss) for p in job.evals]
        if points:
            trace = _line(run, index, points, width=1.8, hovertemplate="%{y:.4f}")
            traces.append(trace.update(mode="lines+markers", marker={"size": 5}))
    return _over_steps(run, traces)


def _token_accuracy(run: RunData) -> PlotlyFigure | None:
    trained: list[Points] = [[(p.step, p.accuracy) for p in job.train] for job in run.jobs]
    evaluated: list[Points] = [[(p.step, p.accuracy) for p in job.evals] for job in run.jobs]
    return _lines_and_dots(run, trained, evaluated, is_percent=True)


def _own_metric(run: RunData, name: str) -> PlotlyFigure | None:
    trained: list[Points] = [[(p.step, p.further.get(name)) for p in job.train] for job in run.jobs]
    evaluated: list[Points] = [[(p.step, p.further.get(name)) for p in job.evals] for job in run.jobs]
    return _lines_and_dots(run, trained, evaluated, is_percent=is_share(name))


def _lines_and_dots(
    run: RunData, trained: list[Points], evaluated: list[Points], *, is_percent: bool
) -> PlotlyFigure | None:
    """For every job: training as smoothed lines, evaluations as dots."""
    hover = "%{y:.1%}" if is_percent else "%{y:.4f}"
    drawable = [(i, points) for i, points in enumerate(trained) if any(y is not None for _, y in points)]
    traces = [_line(run, i, _clear(points), width=1.8, hovertemplate=hover) for i, points in drawable]
    for index, points in enumerate(evaluated):
        known: Points = [(x, y) for x, y in points if y is not None]
        if known:
            trace = _line(run, index, known, width=1.8, hovertemplate=f"{hover} in evaluation")
            colour = job_colours(len(run.jobs))[index]
            traces.append(trace.update(mode="markers", marker={"size": 6, "color": colour}))
    figure = _over_steps(run, traces)
    return figure.update_yaxes(tickformat=".2~%") if figure is not None and is_percent else figure


def _grad_norm(run: RunData) -> PlotlyFigure | None:
    curves: list[Points] = [[(p.step, p.grad_norm) for p in job.train] for job in run.jobs]
    traces = _noisy(run, curves, hover="%{y:.3g}", width=1.8)
    return _over_steps(run, traces)


def _learning_rate(run: RunData) -> PlotlyFigure | None:
    traces = []
    for index, job in enumerate(run.jobs):
        points: Points = [(p.step, p.learning_rate) for p in job.train]
        if any(y is not None for _, y in points):
            traces.append(_line(run, index, points, width=1.8, hovertemplate="%{y:.3g}"))
    figure = _over_steps(run, traces)
    # From zero, or a constant rate would get an axis from -1 to 1.
    return figure.update_yaxes(rangemode="tozero") if figure is not None else None


def _over_steps(run: RunData, traces: list[Any]) -> PlotlyFigure | None:
    if not traces:
        return None
    figure = bare_figure(run, traces, x_title="step")
    if max(trace.x[-1] for trace in traces) <= FEW_STEPS:
        figure.update_xaxes(dtick=1)  # there is no step one and a half
    return figure


def _noisy(run: RunData, curves: list[Points], *, hover: str, width: float) -> list[Any]:
    """Every logged point faintly and, on top, one smoothed line per job."""
    alpha = 0.25 if len(run.jobs) <= CROWDED_FROM else 0.12
    drawable = [(i, points) for i, points in enumerate(curves) if any(y is not None for _, y in points)]
    smoothed = [(i, _clear(points)) for i, points in drawable]
    faint_ones = [
        (i, points) for (i, points), (_, clear) in zip(drawable, smoothed, strict=True) if clear is not points
    ]
    lines = [_line(run, i, points, width=1, alpha=alpha, hoverinfo="skip") for i, points in faint_ones]
    return lines + [_line(run, i, points, width=width, hovertemplate=hover) for i, points in smoothed]


def _clear(points: Points) -> Points:
    """The points smoothed, or unchanged if there are few."""
    num_known = sum(1 for _, y in points if y is not None)
    return smooth(points, min(max(num_known // 16, 5), 100)) if num_known >= SMOOTHED_FROM else points


def _line(run: RunData, index: int, points: Points, *, width: float, alpha: float = 1.0, **hover: str) -> Any:
    limit = min(max(MAX_POINTS // len(run.jobs), MIN_POINTS_PER_JOB), MAX_POINTS_PER_JOB)
    kept = thin(points, limit)
    return graph_objects().Scatter(
        x=[x for x, _ in kept],
        y=rounded([y for _, y in kept], 5),
        name=label(run.jobs[index].name),
        meta={"job": index},
        mode="lines",
        line={"width": width, "color": faint(job_colours(len(run.jobs))[index], alpha)},
        **hover,
    )


def _cross(run: RunData, index: int, points: Points) -> Any:
    step, value = next((x, y) for x, y in reversed(points) if y is not None)
    return graph_objects().Scatter(
        x=[step],
        y=rounded([value], 5),
        name=label(run.jobs[index].name),
        meta={"job": index},
        mode="markers",
        marker={"symbol": "x", "size": 9, "color": job_colours(len(run.jobs))[index]},
        hovertemplate="failed here",
    )
