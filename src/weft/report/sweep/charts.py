"""Draws the trials of a sweep: the objective over steps and tokens, the training loss, and when each ran."""

from __future__ import annotations

from weft.report import readable
from weft.report.figure import PlotlyFigure, label
from weft.report.series import Points, thin
from weft.report.sweep.board import Board
from weft.report.sweep.figure import in_view, lines, marks, sweep_figure
from weft.report.sweep.space_charts import parallel, scatters

MAX_POINTS = 12_000
"""Points of all curves of one chart together: about 400 kB of the page."""
MAX_POINTS_PER_TRIAL = 300
MIN_POINTS_PER_TRIAL = 16
CROWDED_FROM = 40
"""With more trials than this lines and marks get smaller."""
MOST_NAMED = 40
"""Bars of so many trials leave room for their names."""


def draw_sweep_charts(board: Board) -> dict[str, PlotlyFigure]:
    """All figures the board has data for, by chart id."""
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
    """A bar for every trial from its start to its end, in order of start."""
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
