"""Common parts of a sweep's figures: a look for each trial, lines of many trials in one trace, and a fair view.

Colour shows the state of a trial and strength its quality, the same in the table and in every chart. Five hundred
traces would make a browser crawl, so trials of the same look share one trace with gaps between them. Every point has
its trial's index on the board in `customdata` and every trace its state in `meta.job` (the index in `board.counts()`),
so that the page can pick one trial, or hide a state, everywhere at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.report.charts import GREY
from weft.report.figure import PlotlyFigure, Points, faint, graph_objects, label, rounded
from weft.report.sweep_board import Board, BoardTrial
from weft.report.sweep_params import shortened, value_label

BEST_COLOUR = "#d98a3d"
STATE_COLOURS: Mapping[str, str] = {"done": "#4a7fb5", "training": "#3a9fae", "stopped": GREY, "failed": "#c65d5d"}
STRENGTHS = (1.0, 0.72, 0.5, 0.34)
"""Strength of the best quarter of the finished trials, the second, and so on."""
SYMBOLS: Mapping[str, str] = {"done": "circle", "training": "circle-open", "stopped": "square", "failed": "x"}
FENCE = 3.0
"""A value this many times the middle half's width beyond it is not in view at first."""
MIN_FENCED = 4
"""With fewer values none counts as an outlier."""


@dataclass(frozen=True)
class Look:
    state: str
    colour: str
    strength: float
    is_best: bool = False

    @property
    def paint(self) -> str:
        return faint(self.colour, self.strength)


def looks(board: Board) -> list[Look]:
    best = board.best
    done = [trial for trial in board.in_state("done") if trial.value is not None]
    ranks = {id(trial): rank for rank, trial in enumerate(done)}
    drawn = []
    for trial in board.trials:
        if trial is best:
            drawn.append(Look(trial.state, BEST_COLOUR, 1.0, is_best=True))
            continue
        quarter = 4 * ranks[id(trial)] // len(done) if id(trial) in ranks else 0
        strength = 0.42 if trial.state == "stopped" else STRENGTHS[quarter]
        drawn.append(Look(trial.state, STATE_COLOURS.get(trial.state, GREY), strength))
    return drawn


def in_groups(board: Board, indices: Iterable[int]) -> list[tuple[Look, list[int]]]:
    """Trials of the same look together; those to be drawn on top come last."""
    by_look: dict[Look, list[int]] = {}
    known = looks(board)
    for index in indices:
        by_look.setdefault(known[index], []).append(index)
    layer = {"waiting": 0, "stopped": 0, "failed": 1, "done": 2, "training": 3}
    return sorted(by_look.items(), key=lambda item: (item[0].is_best, layer.get(item[0].state, 0), item[0].strength))


def lines(board: Board, curves: Mapping[int, Points], *, hover: str, width: float, best_width: float = 3) -> list[Any]:
    """One trace per look for the curves of trials by index; `hover` may use text (the trial's name), x and y."""
    traces = []
    names = [label(trial.name) for trial in board.trials]
    for look, members in in_groups(board, curves):
        points = [(index, x, y) for index in members for x, y in (*curves[index], (None, None))][:-1]
        is_gap = [x is None for _, x, _ in points]
        traces.append(
            graph_objects().Scatter(
                x=rounded([x for _, x, _ in points], 6),
                y=rounded([y for _, _, y in points], 5),
                customdata=[None if gap else i for gap, (i, _, _) in zip(is_gap, points, strict=True)],
                text=["" if gap else names[i] for gap, (i, _, _) in zip(is_gap, points, strict=True)],
                mode="lines",
                line={"width": best_width if look.is_best else width, "color": look.paint},
                meta=_owner(board, look),
                hovertemplate=hover,
            )
        )
    return traces


def marks(board: Board, points: Mapping[int, tuple[float, float]], *, size: float = 6) -> list[Any]:
    """One trace per look with a mark per trial, a star for the best; hovering shows all about the trial."""
    traces = []
    for look, members in in_groups(board, points):
        traces.append(
            graph_objects().Scatter(
                x=rounded([points[i][0] for i in members], 6),
                y=rounded([points[i][1] for i in members], 5),
                customdata=members,
                text=[described(board, board.trials[i]) for i in members],
                mode="markers",
                marker={
                    "symbol": "star" if look.is_best else SYMBOLS.get(look.state, "circle"),
                    "size": 2 * size + 1 if look.is_best else size,
                    "color": look.paint,
                },
                cliponaxis=False,
                meta=_owner(board, look),
                hovertemplate="%{text}<extra></extra>",
            )
        )
    return traces


def sweep_figure(board: Board, traces: Sequence[Any], *, x_title: str = "", y_title: str = "") -> PlotlyFigure:
    """A figure of the traces and an empty one on top, in which the page draws the trial that a reader picks."""
    go = graph_objects()
    picked = go.Scatter(x=[], y=[], mode="lines+markers", meta={"picked": True}, hoverinfo="skip", cliponaxis=False)
    figure = go.Figure([*traces, picked])
    axis = {"zeroline": False, "exponentformat": "e"}
    figure.update_layout(
        # An empty template: plotly's own would add 7 kB and its colours to every figure.
        template=go.layout.Template(),
        showlegend=False,
        hovermode="closest",
        hoverlabel={"align": "left"},
        margin={"l": 50, "r": 14, "t": 10, "b": 42},
        xaxis={**axis, "nticks": 8, "title": {"text": label(x_title), "standoff": 8}},
        yaxis={**axis, "nticks": 6, "title": {"text": label(y_title), "standoff": 6}, "automargin": True},
    )
    return figure


def described(board: Board, trial: BoardTrial) -> str:
    value = "no value" if trial.value is None else f"{board.metric} {trial.value:.5g}"
    params = [f"{name} {shortened(value_label(given), 40)}" for name, given in trial.params.items()]
    return "<br>".join(label(line) for line in (f"{trial.name} ({trial.state})", value, *params))


def in_view(figure: PlotlyFigure, curves: Sequence[Sequence[float]], mode: str) -> PlotlyFigure:
    """The figure with a vertical axis that shows the sweep even with a few outliers. `curves` are the values of each
    trial. Only the bad side is ever cut; `layout.meta` has the number of trials that leave the view, which the page
    shows."""
    sign = -1.0 if mode == "max" else 1.0
    worst = [max(sign * value for value in values) for values in curves]
    top = fence(worst)
    if top is None:
        return figure
    bottom = min(sign * value for values in curves for value in values)
    pad = 0.05 * (top - bottom)
    figure.update_layout(meta={"outside": sum(value > top for value in worst)})
    return figure.update_yaxes(range=sorted((sign * (bottom - pad), sign * (top + pad))))


def fence(losses: Sequence[float]) -> float | None:
    """The highest value that is not far beyond the middle half; None when none is."""
    if len(losses) < MIN_FENCED:
        return None
    first, third = np.quantile(losses, [0.25, 0.75])
    limit = third + FENCE * (third - first)
    return max(loss for loss in losses if loss <= limit) if third > first and max(losses) > limit else None


def _owner(board: Board, look: Look) -> dict[str, int]:
    return {"job": list(board.counts()).index(look.state)}
