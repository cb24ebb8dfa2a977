"""Which capacity and layout are fastest here: a handful of trials, each measured once and remembered by its content.

First every capacity on one device, then the other layouts with the two that were fastest: eight trials or so where a
grid would have twice as many. What a run says now is always among them. Where several are about as fast, the one that
changes least is recommended.

A trial is a few global batches of every job, trained for real, on a backbone that was loaded for it alone. The first
global batch of each job warms up and does not count. Seconds are those the wall clock saw computing, so that loading,
compiling and evaluating do not count either. Nothing is written.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft.engine.engine import Engine
from weft.engine.events import Event, JobFailed, MicrobatchDone
from weft.engine.train import OpenEngine, prepare_run
from weft.errors import WeftError
from weft.spec import RunSpec
from weft.store.atomic import write_file
from weft.store.json_text import dump
from weft.wall_clock import Activity

WORTH = 0.03
"""Part of the speed by which a change must be faster to be recommended."""
MOST_REMEMBERED = 500
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


Measure = Callable[[Trial], TrialResult]


@dataclass(frozen=True)
class Found:
    """All trials, the first being what the run says now."""

    results: tuple[TrialResult, ...]

    @property
    def now(self) -> TrialResult:
        """As the run is."""
        return self.results[0]

    @property
    def best(self) -> TrialResult:
        """Of all that are about as fast as the fastest, the one that changes least."""
        least = max(result.tokens_per_s for result in self.results) / (1 + WORTH)
        now, close = self.now.trial, [result for result in self.results if result.tokens_per_s >= least]
        return min(close, key=lambda r: (r.trial.layout != now.layout, r.trial.capacity != now.capacity))


def capacities_around(now: int, longest: int) -> list[int]:
    """What a run has now, then a quarter, half and twice of it, as far as a sample fits."""
    return [now, *(other for other in (now // 4, now // 2, 2 * now) if other >= max(longest, 2))]


def search(now: Trial, capacities: Sequence[int], layouts: Sequence[str], measure: Measure) -> Found:
    """Measures what the run says now, and what may be faster."""
    found = {now: measure(now)}

    def try_all(trials: Sequence[Trial]) -> None:
        for trial in trials:
            if trial not in found:
                found[trial] = measure(trial)

    try_all([Trial(capacity, now.layout) for capacity in capacities])
    fastest = sorted(found.values(), key=lambda result: -result.tokens_per_s)[:2]
    others = [layout for layout in layouts if layout != now.layout]
    try_all([Trial(result.trial.capacity, layout) for layout in others for result in fastest])
    return Found(tuple(found.values()))


@dataclass
class RememberedTrials:
    """Results of trials in a file, by what they were measured on: the run, its data, the device and the software."""

    path: Path
    facts: Any
    """All that a result depends on besides the trial, as JSON takes it."""

    def key(self, trial: Trial) -> str:
        """Of a trial under these facts."""
        text = json.dumps([self.facts, dataclasses.asdict(trial)], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    def get(self, trial: Trial) -> TrialResult | None:
        """What was measured before; a file or an entry that is damaged counts as nothing."""
        try:
            return TrialResult(**{**self._read()[self.key(trial)], "trial": trial})
        except (KeyError, TypeError):
            return None

    def put(self, result: TrialResult) -> None:
        """Remembers a result; one of which nothing was measured is tried again next time."""
        if result.problem is None:
            entry = {name: value for name, value in dataclasses.asdict(result).items() if name != "trial"}
            known = {**self._read(), self.key(result.trial): entry}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_file(self.path, dump(dict(list(known.items())[-MOST_REMEMBERED:])))

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def run_facts(spec: RunSpec, lengths: Mapping[str, Sequence[int]], num_steps: int, device: str) -> list[Any]:
    """What trials of a run depend on: its settings but for where it goes, the lengths of its samples, the device."""
    import torch

    import weft

    settings = dataclasses.asdict(spec)
    for name in ("output_dir", "run_name", "report_to", "capacity"):
        settings.pop(name, None)
    digests = {job: hashlib.sha256(str(list(own)).encode()).hexdigest() for job, own in lengths.items()}
    return [settings, digests, num_steps, device, weft.__version__, torch.__version__]


def shown_layout(layout: str) -> str:
    """What to add to a command for a layout."""
    return "" if layout == ONE_DEVICE else f" --layout {layout}"


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
