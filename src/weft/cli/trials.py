"""`weft tune --jobs`: which capacity and layout of a run are fastest here, by a handful of trials.

First every capacity on one device, then the other layouts with the two that were fastest: eight trials or so where a
grid would have twice as many. The run's present settings are always among them. Where several are about as fast, the
one that changes least is recommended.

A trial is a few global batches of every job, trained for real, on a backbone that was loaded for it alone. The first
global batch of each job warms up and does not count. Seconds are those the wall clock saw computing, so that loading,
compiling and evaluating do not count either. Trials are remembered by their content; nothing else is written.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer

from weft.cli.layout_options import LayoutOptions
from weft.data.load import load_job_data
from weft.engine.engine import Engine
from weft.engine.events import Event, JobFailed, MicrobatchDone
from weft.engine.train import OpenEngine, load_engine, prepare_run
from weft.errors import ConfigError, WeftError
from weft.kernels.device import device_name
from weft.kernels.tuning import tuning_file
from weft.model.resolve import ResolvedModel, resolve
from weft.model.source import load_tokenizer
from weft.parallel.stages.load_stages import load_staged
from weft.plan.cost.shape import choose_capacity
from weft.report.readable import output_console, plain_table, print_line
from weft.spec import RunSpec, load_run
from weft.store.atomic import write_file
from weft.store.json_text import dump, read_object
from weft.store.wall_clock import Activity


def tune_run(
    jobs_file: Path, overrides: Sequence[str], steps: int, layouts: Sequence[str] | None, *, again: bool
) -> None:
    """Measures trials of `steps` global batches of every job and shows them; `again`: remembered ones, too."""
    spec = load_run(jobs_file, overrides)
    model = resolve(spec.backbone)
    if layouts is not None:
        for layout in layouts:
            _options(layout).check(spec, (), model)
    now = Trial(choose_capacity(spec.capacity, "cpu" if model.is_cpu else "gpu", spec.longest))
    known = _remembered(spec, model, jobs_file, steps)

    def measure(trial: Trial) -> TrialResult:
        before = None if again else known.get(trial)
        result = before or measure_trial(spec, jobs_file.parent, trial, steps, _opener(model, trial.layout))
        if before is None:
            known.put(result)
        speed = result.problem or f"{result.tokens_per_s:,.0f} tokens/s"
        typer.echo(f"{trial.layout}, capacity {trial.capacity:,}: {speed}{' (measured before)' if before else ''}")
        return result

    tried = layouts if layouts is not None else _possible_layouts(spec, model)
    _show(search(now, capacities_around(now.capacity, spec.longest), tried, measure), jobs_file, overrides)


def _remembered(spec: RunSpec, model: ResolvedModel, jobs_file: Path, steps: int) -> RememberedTrials:
    """Remembered results for the same run, data and machine."""
    tokenizer = load_tokenizer(model.source)
    lengths = {
        job.name: [int(n) for n in load_job_data(job, tokenizer, jobs_file.parent).train.samples.lengths]
        for job in spec.jobs
    }
    facts = run_facts(spec, lengths, steps, f"{device_name(model.device)}, {os.cpu_count()} cores")
    return RememberedTrials(tuning_file().with_name("trials.json"), facts)


def _possible_layouts(spec: RunSpec, model: ResolvedModel) -> list[str]:
    found = []
    for number in (2, 4):
        try:
            if number <= (os.cpu_count() or 1):
                _options(f"stages:{number}").check(spec, (), model)
                found.append(f"stages:{number}")
        except WeftError:
            pass
    return found


def _options(layout: str) -> LayoutOptions:
    return LayoutOptions(None if layout == ONE_DEVICE else layout, may_be_auto=False)


def _opener(model: ResolvedModel, layout: str) -> OpenEngine:
    stages = _options(layout).stages
    if stages is None:
        return load_engine
    return lambda spec, jobs, wall: load_staged(spec, model, jobs, stages, wall)


def _show(found: TrialResults, jobs_file: Path, overrides: Sequence[str]) -> None:
    console = output_console()
    columns = ("layout", "capacity", "rows", "filled", "row tile", "tokens/s", "against now")
    table = plain_table(*columns, left=("layout",))
    measured = sorted((result for result in found.results if not result.problem), key=lambda r: -r.tokens_per_s)
    if not measured:
        raise ConfigError(f"nothing could be measured: {found.now.problem}", where=f"weft tune --jobs {jobs_file}")
    for result in measured:
        change = result.tokens_per_s / found.now.tokens_per_s - 1 if found.now.tokens_per_s else None
        table.add_row(
            result.trial.layout,
            f"{result.trial.capacity:,}",
            f"{result.microbatch_rows:,.0f}",
            f"{result.fill:.0%}",
            f"{result.row_tile:,}",
            f"{result.tokens_per_s:,.0f}",
            "now" if result is found.now else "" if change is None else f"{change:+.0%}",
        )
    console.print()
    console.print(table)
    best = found.best
    if best is found.now:
        lines = ["nothing is clearly faster than the settings of the file"]
    else:
        others = [text for text in overrides if not text.startswith("capacity=")]
        layout = [] if best.trial.layout == ONE_DEVICE else ["--layout", best.trial.layout]
        command = shlex.join(["weft", "train", str(jobs_file), *others, *layout])
        lines = [f"put into {jobs_file}: capacity: {best.trial.capacity}", f"and train with: {command}"]
    if len({result.row_tile for result in measured}) > 1:
        lines.append("bits: the row tile decides them; adapters trained with another one are equal to about 1e-5")
    print_line(console, "\n".join(lines))


WORTH = 0.03
"""Least gain in speed, as a part of it, for which a change is recommended."""
MOST_REMEMBERED = 500
WARM_UP = 1
"""First global batches of each job, which do not count."""
WINDOWS = 2
"""Measurements of a trial, of which the fastest counts: other processes only slow it down."""
ONE_DEVICE = "one device"


@dataclass(frozen=True)
class Trial:
    capacity: int
    layout: str = ONE_DEVICE
    """As `--layout` takes it."""


@dataclass(frozen=True)
class TrialResult:
    trial: Trial
    tokens: int = 0
    seconds: float = 0.0
    num_microbatches: int = 0
    rows: int = 0
    row_tile: int = 0
    """Number of rows that products are computed in; it decides bits."""
    problem: str | None = None

    @property
    def tokens_per_s(self) -> float:
        """Speed of training alone; 0 if nothing was measured."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def microbatch_rows(self) -> float:
        return self.rows / max(1, self.num_microbatches)

    @property
    def fill(self) -> float:
        return self.tokens / max(1, self.rows)


Measure = Callable[[Trial], TrialResult]


@dataclass(frozen=True)
class TrialResults:
    results: tuple[TrialResult, ...]

    @property
    def now(self) -> TrialResult:
        return self.results[0]

    @property
    def best(self) -> TrialResult:
        """The trial that changes least among those within WORTH of the fastest."""
        least = max(result.tokens_per_s for result in self.results) / (1 + WORTH)
        now, close = self.now.trial, [result for result in self.results if result.tokens_per_s >= least]
        return min(close, key=lambda r: (r.trial.layout != now.layout, r.trial.capacity != now.capacity))


def capacities_around(now: int, longest: int) -> list[int]:
    """The present capacity, then a quarter, half and twice of it, as far as a sample fits."""
    return [now, *(other for other in (now // 4, now // 2, 2 * now) if other >= max(longest, 2))]


def search(now: Trial, capacities: Sequence[int], layouts: Sequence[str], measure: Measure) -> TrialResults:
    """Measures the present settings, then all capacities, then the other layouts with the two fastest."""
    found = {now: measure(now)}

    def try_all(trials: Sequence[Trial]) -> None:
        for trial in trials:
            if trial not in found:
                found[trial] = measure(trial)

    try_all([Trial(capacity, now.layout) for capacity in capacities])
    fastest = sorted(found.values(), key=lambda result: -result.tokens_per_s)[:2]
    others = [layout for layout in layouts if layout != now.layout]
    try_all([Trial(result.trial.capacity, layout) for layout in others for result in fastest])
    return TrialResults(tuple(found.values()))


@dataclass
class RememberedTrials:
    """Results of trials in a file, by digests of the run, its data, the device and the software."""

    path: Path
    facts: Any
    """JSON value of all that a result depends on besides the trial."""

    def key(self, trial: Trial) -> str:
        text = json.dumps([self.facts, dataclasses.asdict(trial)], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    def get(self, trial: Trial) -> TrialResult | None:
        """The remembered result; None also for a damaged file or entry."""
        try:
            return TrialResult(**{**read_object(self.path)[self.key(trial)], "trial": trial})
        except (KeyError, TypeError):
            return None

    def put(self, result: TrialResult) -> None:
        if result.problem is None:
            entry = {name: value for name, value in dataclasses.asdict(result).items() if name != "trial"}
            known = {**read_object(self.path), self.key(result.trial): entry}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_file(self.path, dump(dict(list(known.items())[-MOST_REMEMBERED:])))


def run_facts(spec: RunSpec, lengths: Mapping[str, Sequence[int]], num_steps: int, device: str) -> list[Any]:
    """What a result depends on besides its trial, as a cache key: settings without outputs and without the capacity,
    which the trial sets; lengths of samples, number of steps, device and versions."""
    import torch

    import weft

    settings = dataclasses.asdict(spec)
    for name in ("output_dir", "run_name", "report_to", "capacity"):
        settings.pop(name, None)
    digests = {job: hashlib.sha256(str(list(own)).encode()).hexdigest() for job, own in lengths.items()}
    return [settings, digests, num_steps, device, weft.__version__, torch.__version__]


def measure_trial(spec: RunSpec, base_dir: Path, trial: Trial, num_steps: int, open_engine: OpenEngine) -> TrialResult:
    """Trains `num_steps` global batches of every job, or as many as it has; errors become the result's problem."""
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
        window = _train_to(engine, steps)
        done = [event for event in window if isinstance(event, MicrobatchDone)]
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
        events += window
    problem = next((f"{event.job} failed: {event.reason}" for event in events if isinstance(event, JobFailed)), None)
    if problem is None and not best.tokens:
        problem = f"no job has more than {WARM_UP} step, so there is nothing to measure."
    if problem is None and engine.limits.capacity != trial.capacity:
        problem = f"there is memory for {engine.limits.capacity:,} tokens only."
    return best if problem is None else TrialResult(trial, problem=problem)


def _train_to(engine: Engine, step: int) -> list[Event]:
    for name in engine.jobs:
        engine.hold(name, step)
    return list(engine.events())
