"""Draws how the trials of a sweep went: the objective over steps and tokens, the training loss, and when each ran."""

from __future__ import annotations

import statistics

from weft.report.figure import Figure
from weft.report.series import Points, thin
from weft.report.sweep_board import Board, BoardTrial
from weft.report.sweep_figure import in_view, lines, marks, sweep_figure
from weft.report.sweep_space_charts import parallel, scatters
from weft.report.time_charts import _time_unit

MAX_POINTS = 12_000
"""Points of all curves of one chart together: about 400 kB of the page."""
MAX_POINTS_PER_TRIAL = 300
MIN_POINTS_PER_TRIAL = 16
CROWDED_FROM = 40
"""With more trials than this lines and marks get smaller."""


def draw_sweep_charts(board: Board) -> dict[str, Figure]:
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


def _objective(board: Board, over: str) -> Figure | None:
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


def _train_loss(board: Board) -> Figure | None:
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


def _trial_times(board: Board) -> Figure | None:
    """A bar for every trial from its start to its end, in order of start."""
    spans = sorted(trial_spans(board), key=lambda span: (span[1], span[0]))
    if not spans:
        return None
    unit, unit_s = _time_unit(max(end for *_, end in spans))
    rows: dict[int, Points] = {
        index: [(start / unit_s, float(row)), (end / unit_s, float(row))]
        for row, (index, start, end) in enumerate(spans)
    }
    # As thick as there is room for, with a pixel between two bars as long as that leaves one for the bar.
    thick = min(max(520 / len(spans) - 1.5, 1.2), 13)
    hover = f"%{{text}}<br>%{{x:.4~g}} {unit}<extra></extra>"
    figure = sweep_figure(board, lines(board, rows, hover=hover, width=thick, best_width=thick), x_title=unit)
    figure.update_xaxes(rangemode="tozero")
    return figure.update_yaxes(range=[len(spans) - 0.4, -0.6], visible=False, fixedrange=True)


def trial_spans(board: Board) -> list[tuple[int, float, float]]:
    """(trial, start, end) in seconds since the sweep began, worked out from when its objective was seen."""
    paces = {index: pace for index, trial in enumerate(board.trials) if (pace := _pace(trial)) is not None}
    usual = statistics.median(paces.values()) if paces else None
    spans = []
    for index, trial in enumerate(board.trials):
        seen = [(point.step, point.at_s) for point in trial.points if point.at_s is not None]
        if not seen or trial.origin:
            continue  # an earlier sweep had a clock of its own
        pace = paces.get(index, usual)
        (first_step, first_s), (last_step, last_s) = seen[0], seen[-1]
        start = first_s - (first_step * pace if pace is not None else trial.seconds)
        end = last_s + max(trial.steps - last_step, 0) * (pace or 0.0)
        latest = max(last_s, board.seconds if board.seconds is not None else end)
        spans.append((index, max(start, 0.0), min(end, latest)))
    return spans


def _pace(trial: BoardTrial) -> float | None:
    """Seconds per step between the first and the last time the objective was seen."""
    seen = [(point.step, point.at_s) for point in trial.points if point.at_s is not None]
    if len(seen) < 2 or seen[-1][0] <= seen[0][0]:
        return None
    return max(seen[-1][1] - seen[0][1], 0.0) / (seen[-1][0] - seen[0][0])


def _capped(points: Points, num_trials: int) -> Points:
    return thin(points, min(max(MAX_POINTS // num_trials, MIN_POINTS_PER_TRIAL), MAX_POINTS_PER_TRIAL))


def _width(board: Board) -> float:
    return 1.6 if len(board.trials) <= CROWDED_FROM else 1.1
