"""Draws the search space of a sweep: every trial as a line across all parameters, and each parameter on its own."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from weft.report.figure import PlotlyFigure, faint, label
from weft.report.series import Points
from weft.report.sweep.board import Board
from weft.report.sweep.figure import fence, in_view, lines, marks, sweep_figure
from weft.report.sweep.params import Axis, number_label, shortened, varied_axes
from weft.report.time_charts import GREY

SPREAD = 0.3
"""Trials of the same choice are spread over this part of its room to either side."""
GOLDEN = 0.618034
"""Steps of this size fill a stretch evenly, and in no order that looks like a trend."""
FAILED_POSITION = -0.12
"""Position of failed trials, which have no value, below the objective's axis."""
LABEL_ROOM = 36
"""Characters side by side below a small chart."""
MAX_LABEL_LINES = 3
CROWDED_FROM = 7
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
    limit = 20 if len(axes) < CROWDED_FROM else 12
    ticks = [[(position, shortened(text, limit)) for position, text in axis.ticks()] for axis in axes]
    ticks.append(_objective_ticks(worst, best))
    if len(valued) < len(shown):
        ticks[-1].append((FAILED_POSITION, "failed"))
        figure.update_yaxes(range=[FAILED_POSITION - 0.05, 1.05])
    return _with_axes(figure, [axis.label for axis in axes] + [board.metric], ticks)


def scatters(board: Board) -> dict[str, PlotlyFigure]:
    """The objective against each parameter, by chart id."""
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
    """A tick label broken into lines, and cut after a few."""
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
    """Vertical axes with their labels beside them and their names above."""
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
