"""Shows the leaderboard of a sweep in the terminal: the best trials, active ones, and one line of totals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from weft.report import readable
from weft.report.readable import one_line
from weft.report.sweep.board import Board, BoardTrial, read_board
from weft.report.sweep.params import Axis, shortened, value_label, varied_axes
from weft.wording import counted

STATE_STYLES = {"done": "green", "training": "cyan", "waiting": "dim", "stopped": "yellow", "failed": "red"}
MAX_NAME = 28
"""Characters of a trial's name."""
MAX_VALUE = 18
"""Characters of one parameter's value."""


def leaderboard_table(board: Mapping[str, Any], limit: int = 20) -> Table:
    """At most `limit` trials, the best first; while trials train, half of the rows are kept for those."""
    known = read_board(board)
    shown = _shown(known, max(limit, 1))
    axes = varied_axes(known)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", caption_justify="left")
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("trial")
    table.add_column("state", no_wrap=True)
    table.add_column(Text(one_line(known.metric)), justify="right", no_wrap=True)
    table.add_column("steps", justify="right", no_wrap=True)
    # This one and the name may shrink: half a name still identifies the trial, half a number is worthless.
    table.add_column("parameters", overflow="ellipsis", min_width=10)
    for index in shown:
        table.add_row(*_row(known, index, axes))
    hidden = len(known.trials) - len(shown)
    if hidden:
        table.caption = Text(f"… and {counted(hidden, 'more trial')}", style="dim")
    return table


def status_line(board: Mapping[str, Any], remaining_s: float | None = None) -> Text:
    """The sweep in one line: the best so far, trials by state, tokens, time and the remaining budget, speed-up."""
    known = read_board(board)
    parts = []
    if known.best is not None:
        name = readable.cut_middle(one_line(known.best.name), MAX_NAME)
        parts.append(f"best {one_line(known.metric)} {readable.loss(known.best.value)} ({name})")
    parts += [f"{count} {one_line(state)}" for state, count in known.counts().items()]
    parts.append(f"{readable.count(known.tokens)} tokens")
    if known.seconds is not None:
        parts.append(readable.clock(known.seconds))
    if remaining_s is not None:
        parts.append(f"about {readable.clock(remaining_s)} left")
    if known.speed_up is not None:
        parts.append(f"{readable.three_digits(known.speed_up)}x as fast as one by one")
    return Text(" · ".join(parts), style="bold", no_wrap=True, overflow="ellipsis")


def _shown(board: Board, limit: int) -> list[int]:
    """Indices on the board, in its order: the best, and active trials that would not be among them."""
    indices = range(len(board.trials))
    at_work = [index for index in indices if board.trials[index].state == "training"][: limit // 2]
    others = [index for index in indices if index not in set(at_work)]
    return sorted(at_work + others[: limit - len(at_work)])


def _row(board: Board, index: int, axes: Sequence[Axis]) -> tuple[RenderableType, ...]:
    trial = board.trials[index]
    style = "bold" if trial is board.best else ""
    has_rank = trial.value is not None and trial.state != "failed"
    return (
        str(index + 1) if has_rank else readable.NOTHING,
        readable.NameCell(trial.name, style, widest=MAX_NAME),
        Text(one_line(trial.state), style=STATE_STYLES.get(trial.state, "")),
        Text(readable.loss(trial.value), style=style),
        f"{trial.steps}/{trial.total_steps}" if trial.total_steps else str(trial.steps),
        _shrinking(trial.reason, "red") if trial.state == "failed" else _shrinking(_params(trial, axes)),
    )


def _shrinking(text: str, style: str = "") -> Text:
    return Text(one_line(text), style=style, no_wrap=True, overflow="ellipsis")


def _params(trial: BoardTrial, axes: Sequence[Axis]) -> str:
    """The parameters that differ between trials."""
    given = [(axis.label, trial.params[axis.name]) for axis in axes if axis.name in trial.params]
    return ", ".join(f"{name} {shortened(value_label(value), MAX_VALUE)}" for name, value in given)
