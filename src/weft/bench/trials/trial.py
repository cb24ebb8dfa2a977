"""One trial: a few global batches of every job, trained for real, on a backbone that was loaded for it alone.

The first global batch of each job warms up and does not count. Seconds are those the wall clock saw computing, so that
loading, compiling and evaluating do not count either. Nothing is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from weft.engine.engine import Engine
from weft.engine.events import Event, JobFailed, MicrobatchDone
from weft.engine.train import OpenEngine, prepare_run
from weft.errors import WeftError
from weft.spec import RunSpec
from weft.wall_clock import Activity

WARM_UP = 1
"""Global batches of each job that come first and do not count."""
WINDOWS = 2
"""Times that a trial is measured, of which the faster counts: whatever else runs on a machine only slows it down."""
ONE_DEVICE = "one device"


@dataclass(frozen=True)
class Trial:
    """What is tried."""

    capacity: int
    layout: str = ONE_DEVICE
    """As `--layout` takes it."""


@dataclass(frozen=True)
class TrialResult:
    """What came of a trial."""

    trial: Trial
    tokens: int = 0
    seconds: float = 0.0
    num_microbatches: int = 0
    rows: int = 0
    """Computed in all microbatches, padding included."""
    row_tile: int = 0
    """Rows that every frozen product is computed in: jobs trained with another one have other bits."""
    problem: str | None = None
    """Why nothing was measured."""

    @property
    def tokens_per_s(self) -> float:
        """Of training alone; 0 if nothing was measured."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def microbatch_rows(self) -> float:
        """Rows of a microbatch, on average."""
        return self.rows / max(1, self.num_microbatches)

    @property
    def fill(self) -> float:
        """Part of the rows that holds tokens."""
        return self.tokens / max(1, self.rows)


def measure_trial(spec: RunSpec, base_dir: Path, trial: Trial, num_steps: int, open_engine: OpenEngine) -> TrialResult:
    """Trains so many global batches of every job, or as many as it has; what stands in the way is in the result."""
    try:
        with _prepared(replace(spec, capacity=trial.capacity), base_dir, open_engine) as engine:
            return _measured(engine, trial, num_steps)
    except WeftError as error:
        return TrialResult(trial, problem=str(error))


@contextmanager
def _prepared(spec: RunSpec, base_dir: Path, open_engine: OpenEngine) -> Iterator[Engine]:
    engine = prepare_run(spec, base_dir=base_dir, open_engine=open_engine).engine
    assert isinstance(engine, Engine), "a trial is of one engine"
    try:
        yield engine
    finally:
        engine.close()


def _measured(engine: Engine, trial: Trial, num_steps: int) -> TrialResult:
    events, steps = _train_to(engine, WARM_UP), WARM_UP
    wall, best = engine.timeline.wall, TrialResult(trial)
    for _ in range(WINDOWS):
        begun_s, steps = wall.split().seconds(Activity.COMPUTING), steps + num_steps
        told = _train_to(engine, steps)
        done = [event for event in told if isinstance(event, MicrobatchDone)]
        seconds = wall.split().seconds(Activity.COMPUTING) - begun_s
        found = TrialResult(
            trial,
            tokens=sum(event.tokens for event in done),
            seconds=seconds,
            num_microbatches=len(done),
            rows=sum(event.rows for event in done),
            row_tile=engine.row_tile,
        )
        best = max(best, found, key=lambda result: result.tokens_per_s)
        events += told
    problem = _failure(events)
    if problem is None and not best.tokens:
        problem = f"no job has more than {WARM_UP} step, so there is nothing to measure."
    if problem is None and engine.limits.capacity != trial.capacity:
        problem = f"there is memory for {engine.limits.capacity:,} tokens only."
    return best if problem is None else TrialResult(trial, problem=problem)


def _train_to(engine: Engine, step: int) -> list[Event]:
    """Trains every job up to a step."""
    for name in engine.jobs:
        engine.hold(name, step)
    return list(engine.events())


def _failure(events: list[Event]) -> str | None:
    return next((f"{event.job} failed: {event.reason}" for event in events if isinstance(event, JobFailed)), None)
