"""Draws the trials of a sweep: the objective over steps, tokens and parameters, the training loss, when each ran."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from weft.report import readable
from weft.report.charts import GREY
from weft.report.figure import PlotlyFigure, Points, faint, label, thin
from weft.report.sweep_board import Board
from weft.report.sweep_figure import fence, in_view, lines, marks, sweep_figure
from weft.report.sweep_params import Axis, number_label, shortened, varied_axes

MAX_POINTS = 12_000
"""Points of all curves of one chart together: about 400 kB of the page."""
MAX_POINTS_PER_TRIAL = 300
MIN_POINTS_PER_TRIAL = 16
CROWDED_FROM = 40
"""With more trials than this lines and marks get smaller."""
MOST_NAMED = 40
"""Bars of so many trials leave room for their names."""


def draw_sweep_charts(board: Board) -> dict[str, PlotlyFigure]:
    drawn = {
        "by_step": _objective(board, "step"),
        "by_tokens": _objective(board, "tokens"),
        "train_loss": _train_loss(board),
        "parallel": parallel(board),
        **scatters(board),
        "trial_times": _trial_times(board),
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def _objective(board: Board, over: str) -> PlotlyFigure | None:
    """The objective of every trial as it trained, its end marked."""
    curves: dict[int, Points] = {}
    for index, trial in enumerate(board.trials):
        points: Points = [(x, p.value) for p in trial.points if (x := getattr(p, over)) is not None]
        if points:
            curves[index] = _capped(points, len(board.trials))
    if not curves:
        return None
    is_crowded = len(curves) > CROWDED_FROM
    traces = lines(
        board, curves, hover=f"%{{text}}<br>{over} %{{x:,}}: %{{y:.5~g}}<extra></extra>", width=_width(board)
    )
    ends = {index: (x, y) for index, points in curves.items() for x, y in points[-1:] if y is not None}
    figure = sweep_figure(
        board, [*traces, *marks(board, ends, size=4 if is_crowded else 6)], x_title=over, y_title=board.metric
    )
    if over == "tokens":
        figure.update_xaxes(tickformat="~s")
    return in_view(figure, [[p.value for p in trial.points] for trial in board.trials if trial.points], board.mode)


def _train_loss(board: Board) -> PlotlyFigure | None:
    curves: dict[int, Points] = {
        index: _capped(list(trial.losses), len(board.trials))
        for index, trial in enumerate(board.trials)
        if trial.losses
    }
    if not curves:
        return None
    hover = "%{text}<br>step %{x:,}: %{y:.5~g}<extra></extra>"
    figure = sweep_figure(board, lines(board, curves, hover=hover, width=_width(board)), x_title="step", y_title="loss")
    return in_view(figure, [[loss for _, loss in trial.losses] for trial in board.trials if trial.losses], "min")


def _trial_times(board: Board) -> PlotlyFigure | None:
    spans = sorted(trial_spans(board), key=lambda span: (span[1], span[0]))
    if not spans:
        return None
    unit, unit_s = readable.time_unit(max(end for *_, end in spans))
    rows: dict[int, Points] = {
        index: [(start / unit_s, float(row)), (end / unit_s, float(row))]
        for row, (index, start, end) in enumerate(spans)
    }
    # As thick as there is room for, with a pixel between two bars as long as that leaves one for the bar.
    thick = min(max(520 / len(spans) - 1.5, 1.2), 13)
    hover = f"%{{text}}<br>%{{x:.4~g}} {unit}<extra></extra>"
    figure = sweep_figure(board, lines(board, rows, hover=hover, width=thick, best_width=thick), x_title=unit)
    figure.update_xaxes(rangemode="tozero")
    names = [label(board.trials[index].name) for index, *_ in spans]
    figure.update_yaxes(tickvals=list(range(len(spans))), ticktext=names, showgrid=False, showline=False, ticks="")
    has_room = len(spans) <= MOST_NAMED
    return figure.update_yaxes(range=[len(spans) - 0.4, -0.6], visible=has_room, fixedrange=True)


def trial_spans(board: Board) -> list[tuple[int, float, float]]:
    """(trial, start, end) in seconds since the sweep began; a trial that still trains ends now."""
    spans = []
    for index, trial in enumerate(board.trials):
        end = trial.ended_s if trial.ended_s is not None else board.seconds
        # An earlier sweep had a clock of its own.
        if trial.started_s is not None and end is not None and not trial.origin:
            spans.append((index, trial.started_s, max(end, trial.started_s)))
    return spans


def _capped(points: Points, num_trials: int) -> Points:
    return thin(points, min(max(MAX_POINTS // num_trials, MIN_POINTS_PER_TRIAL), MAX_POINTS_PER_TRIAL))


def _width(board: Board) -> float:
    return 1.6 if len(board.trials) <= CROWDED_FROM else 1.1


SPREAD = 0.3
"""Trials of the same choice are spread over this part of its room to either side."""
GOLDEN = 0.618034
"""Steps of this size fill a stretch evenly, and in no order that looks like a trend."""
FAILED_POSITION = -0.12
"""Position of failed trials, which have no value, below the objective's axis."""
LABEL_ROOM = 36
"""Characters side by side below a small chart."""
MAX_LABEL_LINES = 3
MANY_AXES = 7
"""With more axes than this the labels between them get shorter."""


def parallel(board: Board) -> PlotlyFigure | None:
    """Every trial as a line through its parameters to its objective, the best at the top."""
    axes = varied_axes(board)
    shown = [i for i, trial in enumerate(board.trials) if trial.value is not None or trial.state == "failed"]
    valued = [i for i in shown if _value(board, i) is not None]
    if not axes or not valued:
        return None
    worst, best = _ends(board)
    columns = [_spread(board, axis, shown, in_order=True) for axis in axes]
    columns.append({i: _objective_position(_value(board, i), worst, best) for i in shown})
    curves: dict[int, Points] = {i: [(float(x), column[i]) for x, column in enumerate(columns)] for i in shown}
    ends = {i: (float(len(axes)), position) for i in shown if (position := columns[-1][i]) is not None}
    traces = lines(board, curves, hover="%{text}<extra></extra>", width=1.3)
    figure = sweep_figure(board, [*traces, *marks(board, ends, size=5)]).update_yaxes(range=[-0.05, 1.05])
    limit = 20 if len(axes) < MANY_AXES else 12
    ticks = [[(position, shortened(text, limit)) for position, text in axis.ticks()] for axis in axes]
    ticks.append(_objective_ticks(worst, best))
    if len(valued) < len(shown):
        ticks[-1].append((FAILED_POSITION, "failed"))
        figure.update_yaxes(range=[FAILED_POSITION - 0.05, 1.05])
    return _with_axes(figure, [axis.label for axis in axes] + [board.metric], ticks)


def scatters(board: Board) -> dict[str, PlotlyFigure]:
    valued = [i for i in range(len(board.trials)) if _value(board, i) is not None]
    drawn: dict[str, PlotlyFigure] = {}
    for position, axis in enumerate(varied_axes(board)):
        columns = _spread(board, axis, valued, in_order=False)
        points = {
            i: (_x(axis, x), value)
            for i in valued
            if (x := columns[i]) is not None and (value := _value(board, i)) is not None
        }
        if points:
            figure = sweep_figure(board, marks(board, points, size=7 if len(points) <= 60 else 5))
            figure = in_view(figure, [[value] for _, value in points.values()], board.mode)
            drawn[f"scatter_{position}"] = _scaled(figure, axis)
    return drawn


def _scaled(figure: PlotlyFigure, axis: Axis) -> PlotlyFigure:
    figure.update_xaxes(automargin=True).update_layout(margin={"b": 28})
    if axis.kind == "choice":
        num = len(axis.choices)
        width = max(LABEL_ROOM // num, 6)
        ticks = [_in_lines(text, width) for text in axis.choices]
        figure.update_xaxes(tickvals=list(range(num)), ticktext=ticks, tickangle=0, range=[-0.5, num - 0.5])
    elif axis.kind == "log":
        figure.update_xaxes(type="log", dtick=_log_ticks(axis.high / axis.low))
    return figure


def _log_ticks(ratio: float) -> int | str | None:
    """Powers of ten if there are several, else 1, 2 and 5 times them: all nine digits do not fit a small chart."""
    return 1 if ratio >= 100 else "D2" if ratio >= 5 else None


def _in_lines(text: str, width: int) -> str:
    broken = textwrap.wrap(text, width, max_lines=MAX_LABEL_LINES, placeholder=" …")
    return "<br>".join(map(label, broken))


def _x(axis: Axis, position: float) -> float:
    """Coordinate of a trial: choices side by side from 0, ranges at their value."""
    return position * len(axis.choices) - 0.5 if axis.kind == "choice" else axis.value_at(position)


def _spread(board: Board, axis: Axis, shown: Sequence[int], *, in_order: bool) -> dict[int, float | None]:
    """Position of every trial on an axis; trials of one choice side by side, the better the higher if `in_order`."""
    positions = {i: axis.position(board.trials[i].params) for i in shown}
    if axis.kind != "choice":
        return positions
    spread: dict[int, float | None] = dict(positions)
    for centre in {position for position in positions.values() if position is not None}:
        members = [i for i in shown if positions[i] == centre]
        room = 2 * SPREAD / len(axis.choices)
        for order, i in enumerate(members):
            # One alone stands in the middle.
            share = (order + 0.5) / len(members) if in_order else (0.5 + order * GOLDEN) % 1.0
            spread[i] = centre + room * (0.5 - share)
    return spread


def _with_axes(
    figure: PlotlyFigure, names: Sequence[str], ticks: Sequence[Sequence[tuple[float, str]]]
) -> PlotlyFigure:
    upright: dict[str, Any] = {"type": "line", "y0": 0, "y1": 1, "layer": "below"}
    figure.update_layout(
        shapes=[
            upright | {"x0": x, "x1": x, "line": {"color": faint(GREY, 0.55), "width": 1}} for x in range(len(names))
        ],
        annotations=[
            {"x": x, "y": position, "text": label(text), "showarrow": False, "xanchor": "left", "xshift": 7}
            for x, column in enumerate(ticks)
            for position, text in column
        ],
        margin={"l": 36, "r": 74, "t": 34, "b": 12},
        xaxis={
            "side": "top",
            "tickvals": list(range(len(names))),
            "ticktext": [label(shortened(name)) for name in names],
            "range": [-0.06, len(names) - 1],
            "showline": False,
            "fixedrange": True,
        },
        yaxis={"visible": False, "fixedrange": True},
    )
    return figure


def _ends(board: Board) -> tuple[float, float]:
    """The worst value that is no outlier, and the best."""
    sign = -1.0 if board.mode == "max" else 1.0
    losses = [sign * value for i in range(len(board.trials)) if (value := _value(board, i)) is not None]
    top = fence(losses)
    return sign * (max(losses) if top is None else top), sign * min(losses)


def _objective_position(value: float | None, worst: float, best: float) -> float:
    if value is None:
        return FAILED_POSITION
    # What lies beyond the view stands at its end.
    return 0.5 if best == worst else min(max((value - worst) / (best - worst), 0.0), 1.0)


def _objective_ticks(worst: float, best: float) -> list[tuple[float, str]]:
    if best == worst:
        return [(0.5, number_label(best, digits=3))]
    return [(i / 4, number_label(worst + (best - worst) * i / 4, digits=3)) for i in range(5)]


def _value(board: Board, index: int) -> float | None:
    trial = board.trials[index]
    return None if trial.state == "failed" else trial.value
