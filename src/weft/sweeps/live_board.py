"""A sweep in the terminal: the leaderboard, redrawn in place; in a pipe or a log, plain lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from weft.report import readable
from weft.report.live import Screen
from weft.report.sweep_page import leaderboard_table, status_line
from weft.spec.sweep import SweepSpec
from weft.sweeps.trial_loop import SweepRun
from weft.sweeps.trials_file import Trial

FRAME_LINES = 6
"""Lines of the table that are not trials, and one spare line."""


class LiveBoard(Screen):
    def __init__(self, console: Console) -> None:
        self._run: SweepRun | None = None
        super().__init__(console)

    def watch(self, run: SweepRun) -> LiveBoard:
        self._run = run
        return self

    def show_news(self, kind: str, trial: Trial | None, text: str) -> None:
        """Shows an event; on a terminal only what the table does not contain is printed."""
        who = f"{trial.name}: " if trial else ""
        if kind == "warning":
            self.print_line(f"warning: {who}{text}", "yellow")
        elif kind == "layout":
            self.print_line(f"layout: {text}")
        elif kind == "failed":
            self.print_line(f"{who}failed: {text}", "red")
        elif not self.is_redrawn and trial is not None:
            self._print_plain(kind, trial, text)

    def render(self) -> RenderableType:
        if self._run is None:
            return Text()
        board = self._run.ledger.board(with_curves=False)
        table = leaderboard_table(board, limit=max(self._console.height - FRAME_LINES, 1))
        ledger = self._run.ledger
        left_s = remaining_s(ledger.trials, self._run.num_planned, ledger.seconds, self._run.context.spec)
        return Group(table, Text(), status_line(board, left_s))

    def _print_plain(self, kind: str, trial: Trial, text: str) -> None:
        """Prints the lines of a log: start, values, and end of each trial."""
        metric = "" if self._run is None else self._run.context.objective.metric
        value = f"{metric} {readable.loss(trial.value)}"
        if kind == "started":
            at = f" at step {trial.steps}" if trial.steps else ""
            self.print_line(f"{trial.name}: started{at} ({params_text(trial)})")
        elif kind == "point":
            self.print_line(f"{trial.name}: step {trial.steps}/{trial.total_steps}, {value}")
        elif kind == "done":
            self.print_line(f"{trial.name}: done, {value}{f' ({text})' if text else ''}")
        elif kind == "stopped":
            self.print_line(f"{trial.name}: stopped: {text}")
        elif kind == "held":
            self.print_line(f"{trial.name}: waits at step {trial.steps} for the others")


def params_text(trial: Trial) -> str:
    return ", ".join(f"{name} {_value_text(value)}" for name, value in trial.params.items())


def _value_text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def remaining_s(trials: Sequence[Trial], num_planned: int | None, seconds: float, spec: SweepSpec) -> float | None:
    """Predicted seconds left at the present pace; None before anything is known. Running trials count with all their
    steps, later ones with the mean of those that have ended, which includes early stopping. A budget of tokens or time
    may end the sweep sooner."""
    trained = [trial for trial in trials if not trial.origin]
    done, tokens = sum(trial.steps for trial in trained), sum(trial.tokens for trial in trained)
    if not done or seconds <= 0:
        return None
    found = []
    if spec.max_tokens is not None and tokens:
        found.append(seconds * max(spec.max_tokens / tokens - 1, 0.0))
    if spec.max_seconds is not None:
        found.append(max(spec.max_seconds - seconds, 0.0))
    if num_planned is not None:
        left = float(sum(trial.total_steps - trial.steps for trial in trained if not trial.state.is_final))
        ended = [trial.steps for trial in trained if trial.state.is_final] or [t.total_steps for t in trained]
        left += max(num_planned - len(trials), 0) * sum(ended) / len(ended)
        found.append(seconds * left / done)
    return min(found, default=None)
