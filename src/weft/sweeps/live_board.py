"""Shows a sweep in the terminal while it trains: the leaderboard, redrawn in place; in a pipe or a log, plain lines."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from weft.report import readable
from weft.report.live import Screen
from weft.report.sweep.live import leaderboard_table, status_line
from weft.sweeps.eta import remaining_s
from weft.sweeps.record.trials_file import Trial
from weft.sweeps.trial_loop import SweepRun

FRAME_LINES = 6
"""Lines of the table that are not trials, and one to spare."""


class LiveBoard:
    """The leaderboard of a sweep, kept up to date while the `with` block runs."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._run: SweepRun | None = None
        self._screen = Screen(console, self.render)

    def watch(self, run: SweepRun) -> LiveBoard:
        """The sweep to show."""
        self._run = run
        return self

    def __enter__(self) -> LiveBoard:
        self._screen.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._screen.stop()

    def hear(self, kind: str, trial: Trial | None, text: str) -> None:
        """Takes news of the sweep; on a terminal only what the table cannot say is printed."""
        who = f"{trial.name}: " if trial else ""
        if kind == "warning":
            self._screen.print_line(f"warning: {who}{text}", "yellow")
        elif kind == "failed":
            self._screen.print_line(f"{who}failed: {text}", "red")
        elif not self._screen.is_redrawn and trial is not None:
            self._print_plain(kind, trial, text)

    def render(self) -> RenderableType:
        """The table as it stands."""
        if self._run is None:
            return Text()
        board = self._run.ledger.board(with_curves=False)
        table = leaderboard_table(board, limit=max(self._console.height - FRAME_LINES, 1))
        ledger = self._run.ledger
        left_s = remaining_s(ledger.trials, self._run.num_planned, ledger.seconds, self._run.context.spec)
        return Group(table, Text(), status_line(board, left_s))

    def _print_plain(self, kind: str, trial: Trial, text: str) -> None:
        """The lines a log gets: the start, the values, and the end of each trial."""
        metric = "" if self._run is None else self._run.context.objective.metric
        value = f"{metric} {readable.loss(trial.value)}"
        if kind == "started":
            place = f" at step {trial.steps}" if trial.steps else ""
            self._screen.print_line(f"{trial.name}: started{place} ({params_text(trial)})")
        elif kind == "point":
            self._screen.print_line(f"{trial.name}: step {trial.steps}/{trial.total_steps}, {value}")
        elif kind == "done":
            self._screen.print_line(f"{trial.name}: done, {value}{f' ({text})' if text else ''}")
        elif kind == "stopped":
            self._screen.print_line(f"{trial.name}: stopped: {text}")
        elif kind == "held":
            self._screen.print_line(f"{trial.name}: waits at step {trial.steps} for the others")


def params_text(trial: Trial) -> str:
    """What a trial chose, in one line."""
    return ", ".join(f"{name} {_value_text(value)}" for name, value in trial.params.items())


def _value_text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
