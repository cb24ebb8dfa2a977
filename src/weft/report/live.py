"""Shows a run in the terminal while it trains, and its results at the end.

On a terminal the table is redrawn in place; in a pipe or a CI log the same events become a few plain lines per job.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from weft.engine.events import (
    EvalDone,
    Event,
    JobCancelled,
    JobEnded,
    JobEvent,
    JobFailed,
    JobPaused,
    JobPreempted,
    JobResumed,
    JobsGrouped,
    JobStarted,
    JobSucceeded,
    JobWaiting,
    JobWarning,
    LayoutDecided,
    MicrobatchDone,
    MicrobatchesPaired,
    StepDone,
)
from weft.errors import counted
from weft.job_state import JobState
from weft.report import readable
from weft.report.run_data import JobReport

STATE_STYLES: Mapping[str, str] = {
    JobState.RUNNING: "cyan",
    JobState.PAUSED: "yellow",
    JobState.FAILED: "red",
    JobState.QUEUED: "dim",
    JobState.SUCCEEDED: "green",
    JobState.CANCELLED: "yellow",
}
"""States in the order of priority when the terminal is too low for all jobs."""
WIDE_COLUMNS = 100
"""Narrower terminals get no bars and no learning rates."""
FRAME_LINES = 6
"""Lines of the table that are not jobs, and one to spare."""
TREND_STYLES = {-1: ("↓", "green"), 0: ("→", "dim"), 1: ("↑", "red")}


class Screen(ABC):
    """Shows what `render` returns, four times a second, while the `with` block runs."""

    def __init__(self, console: Console) -> None:
        """Called last by subclasses, since it renders once."""
        self._console = console
        self._live = Live(console=console, get_renderable=self.render, refresh_per_second=4, transient=True)
        self.is_redrawn = console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf")
        """False: only printed lines are visible."""

    def __enter__(self) -> Self:
        if self.is_redrawn:
            self._live.start(refresh=True)
        return self

    def __exit__(self, *error: object) -> None:
        if self.is_redrawn:
            self._live.stop()

    @abstractmethod
    def render(self) -> RenderableType: ...

    def print_line(self, line: str, style: str = "") -> None:
        """Prints one line with any characters: a log may take ASCII only, and a name must not end a run."""
        encoding = self._console.encoding
        shown = readable.one_line(line).encode(encoding, "backslashreplace").decode(encoding)
        self._console.print(Text(shown, style=style), soft_wrap=not self.is_redrawn)


class LiveTable(Screen):
    """One row per job and a line of totals; once the run is over it gives way to `summary_table`."""

    def __init__(
        self, console: Console, jobs: Sequence[tuple[str, int]], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`jobs` names each job and its number of optimizer steps, in the order to show them."""
        self._progress = RunProgress(jobs)
        self._clock = clock
        self._started = clock()
        self._lock = threading.Lock()  # the table is drawn by a thread of its own
        self._tenths: dict[str, int] = {}
        super().__init__(console)

    def __enter__(self) -> Self:
        self._started = self._clock()
        return super().__enter__()

    def update(self, event: Event) -> None:
        """Applies one event to the table; on a terminal, only what the table does not show is printed."""
        with self._lock:
            job = self._progress.apply(event)
        if isinstance(event, JobWarning):
            who = f"{', '.join(event.jobs)}: " if event.jobs else ""
            self.print_line(f"warning: {who}{event.message}", "yellow")
        elif isinstance(event, JobsGrouped):
            self.print_line(f"groups: {event.text}")
        elif isinstance(event, MicrobatchesPaired):
            self.print_line(f"pairs: {event.text}")
        elif isinstance(event, LayoutDecided):
            self.print_line(f"layout: {event.text}")
        elif isinstance(event, JobFailed):
            self.print_line(f"{event.job}: failed: {event.reason}", "red")
        elif not self.is_redrawn and job is not None:
            self._print_progress(event, job)

    def render(self) -> RenderableType:
        with self._lock:
            table = self._table(self._shown())
            hidden = len(self._progress.jobs) - table.row_count
            more = [Text(f"  … and {counted(hidden, 'more job')}", style="dim")] if hidden else []
            return Group(table, *more, Text(), self._totals())

    def _shown(self) -> list[ReportedProgress]:
        """The jobs there is room for: active ones first, all in their original order."""
        jobs = list(self._progress.jobs.values())
        room = max(self._console.height - FRAME_LINES, 1)
        if len(jobs) <= room:
            return jobs
        ranks = list(STATE_STYLES)
        kept = sorted(range(len(jobs)), key=lambda i: (ranks.index(jobs[i].state), i))[: max(room - 1, 1)]
        return [jobs[i] for i in sorted(kept)]

    def _table(self, jobs: Sequence[ReportedProgress]) -> Table:
        is_wide = self._console.width >= WIDE_COLUMNS
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        # The only column that may shrink: half a name still identifies the job, half a number is worthless.
        table.add_column("job")
        table.add_column("state", no_wrap=True)
        if is_wide:
            table.add_column("", width=16)
        for name in ("step", "loss", "eval loss", *(["lr"] if is_wide else []), "tokens/s", "ETA"):
            table.add_column(name, justify="right", no_wrap=True)
        for job in jobs:
            bar = ProgressBar(total=max(job.num_steps, 1), completed=job.step, width=16)
            rate = job.tokens.per_s if job.state is JobState.RUNNING else None
            table.add_row(
                readable.NameCell(job.name, widest=32),
                Text(job.state, style=STATE_STYLES[job.state]),
                *([bar] if is_wide else []),
                f"{job.step}/{job.num_steps}",
                self._loss(job),
                readable.loss(job.eval_loss),
                *([readable.learning_rate(job.learning_rate)] if is_wide else []),
                readable.rate(rate),
                readable.clock(job.eta_s),
            )
        return table

    def _loss(self, job: ReportedProgress) -> Text:
        if job.loss is None:
            return Text(readable.NOTHING)
        arrow, style = TREND_STYLES[job.trend]
        return Text.assemble(readable.loss(job.loss), " ", (arrow, style))

    def _totals(self) -> Text:
        run = self._progress
        parts = [f"{readable.rate(run.tokens_per_s)} tokens/s"]
        if run.fill is not None:
            parts.append(f"{readable.percent(run.fill)} of the rows hold tokens")
        parts.append(f"{readable.clock(self._clock() - self._started)} elapsed")
        parts += [f"{run.count(state)} {state}" for state in STATE_STYLES if run.count(state)]
        return Text(" · ".join(parts), style="bold", no_wrap=True, overflow="ellipsis")

    def _print_progress(self, event: Event, job: ReportedProgress) -> None:
        """Prints the few lines of a log: the start, every tenth of the steps, and changes of state."""
        if isinstance(event, JobStarted):
            where = f" at step {job.step}" if job.step else ""
            self.print_line(f"{job.name}: started{where}, {counted(job.num_steps, 'step')}")
        elif isinstance(event, JobPaused | JobWaiting | JobPreempted | JobResumed | JobCancelled):
            reason = None if isinstance(event, JobResumed | JobCancelled) else event.reason
            why = "" if reason is None else f" ({reason})"
            self.print_line(f"{job.name}: {event.kind} at step {job.step}{why}")
        elif isinstance(event, JobSucceeded):
            early = " (stopped early)" if event.early_stopped else ""
            adapter = f", adapter in {event.adapter_dir}" if event.adapter_dir else ""
            self.print_line(f"{job.name}: succeeded after {counted(job.step, 'step')}{early}, {_losses(job)}{adapter}")
        elif isinstance(event, StepDone) and job.step < job.num_steps:
            tenth = 10 * job.step // job.num_steps
            if tenth > self._tenths.get(job.name, 0):
                self._tenths[job.name] = tenth
                pace = f", {readable.rate(job.tokens.per_s)} tokens/s" if job.tokens.per_s is not None else ""
                left = f", {readable.clock(job.eta_s)} left" if job.eta_s is not None else ""
                where = f"step {job.step}/{job.num_steps} ({100 * job.step // job.num_steps} %)"
                self.print_line(f"{job.name}: {where}, {_losses(job)}{pace}{left}")


def summary_table(rows: Sequence[JobReport]) -> Table:
    """The results of a run, one row per job; `rows` are `read_run(...).jobs`."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("job")
    table.add_column("state", no_wrap=True)
    for name in ("steps", "loss", "best eval", "tokens", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    has_measures = any(job.measured for job in rows)
    if has_measures:
        table.add_column("measured", overflow="fold")
    has_remarks = any(job.remarks for job in rows)
    if has_remarks:
        table.add_column("remarks", overflow="fold")
    for job in rows:
        steps = f"{job.step}" if job.num_steps in (None, job.step) else f"{job.step}/{job.num_steps}"
        table.add_row(
            readable.NameCell(job.name),
            Text(readable.one_line(job.state), style=STATE_STYLES.get(job.state, "")),
            steps,
            readable.loss(job.final_loss),
            readable.loss(job.best_eval_loss),
            readable.count(job.trained_tokens),
            readable.rate(job.tokens_per_s),
            *([Text(readable.measures(job.measured))] if has_measures else []),
            *([Text(readable.one_line("; ".join(job.remarks)), style="dim")] if has_remarks else []),
        )
    return table


def _losses(job: ReportedProgress) -> str:
    text = f"loss {readable.loss(job.loss)}"
    return text if job.eval_loss is None else f"{text}, eval loss {readable.loss(job.eval_loss)}"


RATE_WINDOW_S = 30.0
MAX_MARKS = 512
STATES: Mapping[type[Event], JobState] = {
    JobStarted: JobState.RUNNING,
    JobResumed: JobState.RUNNING,
    StepDone: JobState.RUNNING,
    JobPaused: JobState.PAUSED,
    JobWaiting: JobState.QUEUED,
    JobPreempted: JobState.QUEUED,
}
"""The state a job is in after an event that does not end it."""


class Rate:
    def __init__(self) -> None:
        self._marks: deque[tuple[float, float]] = deque(maxlen=MAX_MARKS)

    def add(self, seconds: float, amount: float) -> None:
        self._marks.append((seconds, amount))
        while self._marks[0][0] < seconds - RATE_WINDOW_S and len(self._marks) > 2:
            self._marks.popleft()

    @property
    def per_s(self) -> float | None:
        if not self._marks:
            return None
        (first, _), (last, _) = self._marks[0], self._marks[-1]
        # What was complete at the first moment was made before it.
        return sum(amount for at, amount in self._marks if at > first) / (last - first) if last > first else None


@dataclass
class ReportedProgress:
    name: str
    num_steps: int
    state: JobState = JobState.QUEUED
    step: int = 0
    loss: float | None = None
    eval_loss: float | None = None
    learning_rate: float | None = None
    tokens: Rate = field(default_factory=Rate)
    steps: Rate = field(default_factory=Rate)
    _means: tuple[float, float] | None = None
    """Quick and slow running means of the loss."""

    def step_done(self, event: StepDone) -> None:
        self.steps.add(event.seconds, event.step - self.step)
        self.tokens.add(event.seconds, event.tokens)
        self.step, self.num_steps = event.step, event.num_steps
        self.learning_rate, self.loss = event.learning_rate, event.loss
        if not math.isnan(self.loss):  # a NaN must not stay in the means
            quick, slow = self._means or (self.loss, self.loss)
            self._means = (quick + 0.3 * (self.loss - quick), slow + 0.08 * (self.loss - slow))

    @property
    def trend(self) -> int:
        """-1 while the loss falls, 1 while it rises, 0 while it does neither by more than one per cent."""
        if self._means is None:
            return 0
        quick, slow = self._means
        margin = 0.01 * abs(slow)
        return -1 if quick < slow - margin else 1 if quick > slow + margin else 0

    @property
    def eta_s(self) -> float | None:
        pace = self.steps.per_s
        return (self.num_steps - self.step) / pace if pace and self.state is JobState.RUNNING else None


class RunProgress:
    def __init__(self, jobs: Sequence[tuple[str, int]]) -> None:
        self.jobs = {name: ReportedProgress(name, num_steps) for name, num_steps in jobs}
        self._filled = self._rows = 0.0

    def apply(self, event: Event) -> ReportedProgress | None:
        if isinstance(event, MicrobatchDone):
            self._filled += event.tokens
            self._rows += event.rows
        if not isinstance(event, JobEvent):
            return None
        job = self.jobs.setdefault(event.job, ReportedProgress(event.job, 0))
        job.state = event.state if isinstance(event, JobEnded) else STATES.get(type(event), job.state)
        if isinstance(event, StepDone):
            job.step_done(event)
        elif isinstance(event, EvalDone):
            job.eval_loss = event.eval_loss
        elif isinstance(event, JobStarted):
            job.step, job.num_steps = event.step, event.num_steps
        return job

    @property
    def tokens_per_s(self) -> float | None:
        """Sum of the rates of the running jobs; None before one has taken two steps."""
        # Jobs step together: one count of all their tokens would take the first time they do for a rush.
        rates = [job.tokens.per_s for job in self.jobs.values() if job.state is JobState.RUNNING]
        known = [rate for rate in rates if rate is not None]
        return sum(known) if known else None

    @property
    def fill(self) -> float | None:
        """Fraction of all microbatch rows that held tokens, 0 to 1."""
        return self._filled / self._rows if self._rows else None

    def count(self, state: str) -> int:
        return sum(1 for job in self.jobs.values() if job.state == state)
