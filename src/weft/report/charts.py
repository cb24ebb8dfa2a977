"""All figures of a run: curves of every job over its steps, and where the time went.

The number of points is capped, so a week of training makes a page as light as a minute of it.
"""

from __future__ import annotations

from typing import Any

from weft.objectives.objective import is_share
from weft.report import readable
from weft.report.figure import (
    PlotlyFigure,
    Points,
    bare_figure,
    faint,
    graph_objects,
    in_chunks,
    job_colours,
    label,
    rate_in_bins,
    rounded,
    smooth,
    thin,
)
from weft.report.run_data import ReportSpan, RunData

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
    drawn = {
        "loss": _loss(run),
        "eval_loss": _eval_loss(run),
        "token_accuracy": _metric(run),
        **{chart: _metric(run, name) for chart, name in own_metrics(run).items()},
        "learning_rate": _learning_rate(run),
        "grad_norm": _grad_norm(run),
        "throughput": throughput(run),
        "fill": fill(run),
        "timeline": timeline(run),
        "dispatch": dispatch(run),
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def _loss(run: RunData) -> PlotlyFigure | None:
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


def _metric(run: RunData, own: str | None = None) -> PlotlyFigure | None:
    """Token accuracy of every job, or another metric: training as smoothed lines, evaluations as dots."""

    def value(point: Any) -> float | None:
        found: float | None = point.accuracy if own is None else point.further.get(own)
        return found

    is_percent = own is None or is_share(own)
    hover = "%{y:.1%}" if is_percent else "%{y:.4f}"
    lines, dots = [], []
    for index, job in enumerate(run.jobs):
        trained: Points = [(p.step, value(p)) for p in job.train]
        if any(y is not None for _, y in trained):
            lines.append(_line(run, index, _clear(trained), width=1.8, hovertemplate=hover))
        known: Points = [(p.step, y) for p in job.evals if (y := value(p)) is not None]
        if known:
            trace = _line(run, index, known, width=1.8, hovertemplate=f"{hover} in evaluation")
            colour = job_colours(len(run.jobs))[index]
            dots.append(trace.update(mode="markers", marker={"size": 6, "color": colour}))
    figure = _over_steps(run, lines + dots)
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


NUM_BINS = 90
MAX_FILL_POINTS = 180
MAX_MICROBATCHES = 160
"""Microbatches drawn one by one: each is a few pixels wide then."""
MAX_BARS = 3_000
"""Bars of all microbatches together: with more of them a phone hesitates."""
MAX_REPLICAS = 8
"""Replicas with separate bands in the timeline: with more, bands are too flat to read."""
SIDE_LANES = ("step", "eval", "checkpoint", "plan")
LANE_HEIGHT = 0.075
GREY = "#8a93a3"


def throughput(run: RunData) -> PlotlyFigure | None:
    """Trained tokens per second in equal stretches of time, one layer per job."""
    end = run.seconds
    if not end:
        return None
    unit, unit_s = readable.time_unit(end)
    centres = rounded([(i + 0.5) * end / NUM_BINS / unit_s for i in range(NUM_BINS)])
    traces = []
    for index, job in enumerate(run.jobs):
        marks = [(p.time, p.num_tokens) for p in job.train if p.time is not None and p.num_tokens is not None]
        rates = rate_in_bins([(job.start_s, 0.0), *marks], end, NUM_BINS)
        if any(rates):
            traces.append(_layer(run, index, centres, rounded(rates)))
    if not traces:
        return None
    figure = bare_figure(run, traces, x_title=unit)
    return figure.update_yaxes(rangemode="tozero", tickformat="~s")


def fill(run: RunData) -> PlotlyFigure | None:
    """Fraction of the microbatches' rows that held tokens, over time."""
    spans = [span for span in run.microbatches if span.rows]
    if not spans:
        return None
    unit, unit_s = readable.time_unit(run.seconds or 0.0)
    chunks = [spans[part] for part in in_chunks(len(spans), MAX_FILL_POINTS)]
    trace = graph_objects().Scatter(
        x=rounded([(chunk[0].start_s + _end(chunk[-1])) / 2 / unit_s for chunk in chunks], 6),
        y=rounded([100 * sum(s.tokens for s in chunk) / sum(s.rows for s in chunk) for chunk in chunks]),
        mode="lines",
        line={"width": 1.4, "color": GREY},
        fill="tozeroy",
        fillcolor=faint(GREY, 0.2),
        hovertemplate="%{y:.1f} %<extra></extra>",
    )
    figure = bare_figure(run, [trace], x_title=unit)
    return figure.update_yaxes(range=[0, 102], ticksuffix=" %")


def dispatch(run: RunData) -> PlotlyFigure | None:
    """Seconds of every step whose samples replicas shared, as measured and as predicted."""
    steps = run.compared_steps
    if not steps:
        return None
    curves = {"measured": [step.seconds for step in steps], "predicted": [step.predicted_s for step in steps]}
    traces = [
        graph_objects().Scatter(
            x=[number for number, _ in points],
            y=rounded([seconds for _, seconds in points]),
            name=name,
            mode="lines",
            line={"width": 1.8 if name == "measured" else 1.4, "color": colour, "dash": dash},
            hovertemplate="%{y:.3g} s",
        )
        for (name, seconds), colour, dash in zip(curves.items(), job_colours(2), ("solid", "dot"), strict=True)
        for points in [thin(list(enumerate(seconds, start=1)), MAX_POINTS_PER_JOB)]
    ]
    figure = bare_figure(run, traces, x_title="step")
    return figure.update_yaxes(rangemode="tozero", ticksuffix=" s")


def timeline(run: RunData) -> PlotlyFigure | None:
    """The first microbatches as columns, coloured by the share of each job, and the other work below them. Each
    replica, or each stage of one, has a band."""
    shown = drawn_microbatches(run)
    if not shown:
        return None
    replicas = sorted({span.replica for span in shown})[:MAX_REPLICAS]
    columns = [
        _columns(run, index, tuple(span for span in shown if span.replica == replica), band)
        for band, replica in enumerate(replicas)
        for index in range(len(run.jobs))
    ]
    start_s, end_s = shown[0].start_s, _end(shown[-1])
    if len(shown) == len(run.microbatches):
        # The last evaluations come after the last microbatch.
        end_s = max([end_s, *(_end(span) for span in run.spans if span.name in SIDE_LANES)])
    lanes = [lane for name in SIDE_LANES if (lane := _lane(run, name, start_s, end_s)) is not None]
    figure = bare_figure(run, [c for c in columns if c is not None] + lanes, x_title="seconds")
    figure.update_layout(barmode="stack", bargap=0, hovermode="closest")
    figure.update_xaxes(range=rounded([start_s, end_s], 6))
    top = LANE_HEIGHT * len(lanes)
    figure.update_layout(_bands([run.band_name(index) for index in replicas], top + 0.05 if lanes else 0.0))
    if not lanes:
        return figure
    order = {"categoryorder": "array", "categoryarray": [lane.name for lane in reversed(lanes)]}
    figure.update_layout(
        xaxis={"anchor": "y2"},
        yaxis2={"domain": [0, top], "anchor": "x", "automargin": True, "fixedrange": True, "showgrid": False, **order},
    )
    return figure


def _bands(names: list[str], bottom: float) -> dict[str, Any]:
    height = (1 - bottom) / len(names)
    axes: dict[str, Any] = {}
    for band, name in enumerate(names):
        top = 1 - band * height
        axis: dict[str, Any] = {"domain": [top - (0.93 if len(names) > 1 else 1) * height, top], "range": [0, 102]}
        if len(names) == 1:
            axis["ticksuffix"] = " %"
        else:
            # Written across: names turned upright would run into each other.
            axis |= {"tickvals": [50], "ticktext": [name], "automargin": True}
            axis |= {"anchor": "x", "zeroline": False, "ticks": "", "showgrid": False}
        axes["yaxis" + _axis_number(band)] = axis
    return axes


def _axis_number(band: int) -> str:
    """Plotly's number of the axis of a band; the second one is that of the side lanes."""
    return str(band + 2) if band else ""


def drawn_microbatches(run: RunData) -> tuple[ReportSpan, ...]:
    num_bars = 0
    shown: list[ReportSpan] = []
    for span in run.microbatches[:MAX_MICROBATCHES]:
        num_bars += len(span.jobs)
        if num_bars > MAX_BARS and shown:
            break
        shown.append(span)
    return tuple(shown)


def _layer(run: RunData, index: int, times: list[float | None], rates: list[float | None]) -> Any:
    colour = job_colours(len(run.jobs))[index]
    return graph_objects().Scatter(
        x=times,
        y=rates,
        name=label(run.jobs[index].name),
        meta={"job": index},
        mode="lines",
        stackgroup="jobs",
        # Without a line, since a job that has ended would draw one along the top of the others.
        line={"width": 0, "color": colour},
        fillcolor=faint(colour, 0.8),
        hovertemplate="%{y:,.0f}",
    )


def _columns(run: RunData, index: int, spans: tuple[ReportSpan, ...], band: int) -> Any:
    """One job's part of every microbatch of a replica that it is in; None if it is in none."""
    job = run.jobs[index].name
    own = [span for span in spans if span.jobs.get(job)]
    if not own:
        return None
    return graph_objects().Bar(
        x=rounded([span.start_s + span.duration_s / 2 for span in own], 6),
        width=rounded([span.duration_s for span in own]),
        y=rounded([100 * span.jobs[job] / (span.rows or span.tokens or 1) for span in own]),
        customdata=[[span.jobs[job], span.rows, *rounded([1000 * span.duration_s], 3)] for span in own],
        name=label(job),
        yaxis="y" + _axis_number(band),
        meta={"job": index},
        marker={"color": job_colours(len(run.jobs))[index], "line": {"width": 0}},
        hovertemplate="%{fullData.name}: %{customdata[0]} of %{customdata[1]} rows, %{customdata[2]} ms<extra></extra>",
    )


def _lane(run: RunData, name: str, start_s: float, end_s: float) -> Any:
    spans = [span for span in run.spans if span.name == name and start_s <= span.start_s <= end_s][:MAX_MICROBATCHES]
    if not spans:
        return None
    return graph_objects().Bar(
        orientation="h",
        y=[name] * len(spans),
        yaxis="y2",
        base=rounded([span.start_s for span in spans], 6),
        x=rounded([span.duration_s for span in spans]),
        width=0.55,
        name=name,
        customdata=rounded([1000 * span.duration_s for span in spans], 3),
        # The outline keeps spans shorter than a pixel visible.
        marker={"color": GREY, "line": {"width": 1, "color": GREY}},
        hovertemplate=f"{name}: %{{customdata}} ms<extra></extra>",
    )


def _end(span: ReportSpan) -> float:
    return span.start_s + span.duration_s
