"""Runs a sweep from its settings to its result; everything is checked before anything is written."""

from __future__ import annotations

import contextlib
import datetime
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from weft.data.load import find_sources
from weft.engine.execute.data_ahead import DataAhead
from weft.engine.resume import HARMLESS, check_job_inputs, check_same_backbone
from weft.engine.train import clock_of, load_engine, write_record
from weft.errors import ConfigError, MissingExtraError, StorageError
from weft.report.read_run import read_info
from weft.report.sweep_page import write_sweep_report
from weft.report.trackers import open_trackers
from weft.settings import describe, field_names
from weft.spec import JobSpec
from weft.spec.load import parse
from weft.spec.load_sweep import in_its_words, load_sweep, probe_jobs, space_of, sweep_from_mapping
from weft.spec.sweep import SweepSpec, resolved_sweep
from weft.store.atomic import add_guard, remove_leftovers, write_file
from weft.store.run_dir import RunDirectory, RunFiles
from weft.store.wall_clock import Activity, TimeSplit, WallClock
from weft.sweeps.configure import Configurations, SweepEngine
from weft.sweeps.leaderboard import TRIALS, read_previous
from weft.sweeps.ledger import OnNews, PreparedSweep, SweepContext
from weft.sweeps.objective import TrialObjective
from weft.sweeps.samplers import make_sampler, sampler_name
from weft.sweeps.trial_loop import SweepRun, can_be_alone, one_by_one_seconds
from weft.sweeps.trials_file import Trial, TrialsFile

OpenSweepEngine = Callable[
    [SweepSpec, Sequence[JobSpec], WallClock | None], tuple[SweepSpec, SweepEngine, tuple[str, ...]]
]
SETTINGS, REPORT = "sweep.yaml", "report.html"
KEPT = ("base_model", "defaults", "space", "objective", "sampler", "seed", "capacity", "quantize", "dtype")
"""Settings that a resumed sweep keeps, except harmless ones of its job, so that its trials are comparable. Budgets and
early stopping may change."""


@dataclass(frozen=True)
class SweepResult:
    best: Trial | None
    """None if no trial has a value."""
    trials: list[Trial]
    leaderboard: list[dict[str, Any]]
    folder: Path
    no_report: str = ""


def sweep(given: Mapping[str, Any] | str | Path, *, resume: bool = False, **overrides: Any) -> SweepResult:
    begun_s = time.perf_counter()
    if isinstance(given, Mapping):
        tree, base_dir = dict(given), Path()
    elif isinstance(given, str | Path):
        tree, base_dir = parse(Path(given), "sweep")[0], Path(given).parent
    else:
        raise ConfigError(f"expected a sweep file or a mapping of its settings, got {describe(given)}.")
    if isinstance(given, Mapping) or overrides:
        names = field_names(SweepSpec)
        replaced = {names.get(name, name) for name in overrides}
        kept = {key: value for key, value in tree.items() if names.get(str(key), key) not in replaced}
        spec = sweep_from_mapping({**kept, **overrides}, base_dir=base_dir)
    else:
        spec = load_sweep(given)
    if "://" in spec.output_dir:
        found = f"is the URL {spec.output_dir!r}; only the command `weft sweep` takes URLs"
        raise ConfigError(f"{found}, name a directory.", where="output_dir")
    folder = Path(spec.output_dir)
    spec = check_folder(spec, folder, resume=resume)
    try:
        prepared = prepare_sweep(spec, base_dir, begun_at(folder) if resume else None, begun_s=begun_s)
    except ConfigError as error:
        raise in_its_words(error, tree) from None
    with open_run(prepared, folder, resume=resume) as run:
        run.train()
        return conclude(run)


def check_folder(spec: SweepSpec, folder: Path, *, resume: bool) -> SweepSpec:
    """Raises if the folder cannot be used, without writing; a resumed sweep gets the capacity it began with."""
    try:
        RunDirectory.check(folder / TRIALS, resume=resume, content="sweep")
    except StorageError as error:
        raise error.at(str(folder)) from None
    if not resume:
        return spec
    saved = yaml.safe_load((folder / SETTINGS).read_text(encoding="utf-8"))
    if spec.capacity == "auto":
        spec = replace(spec, capacity=saved.get("capacity"))
    now = resolved_sweep(spec)
    for name in KEPT:
        if _bare(saved.get(name)) != _bare(now[name]):
            raise ConfigError(
                f"the sweep in {folder} has {json.dumps(saved.get(name))}, this one {json.dumps(now[name])}; a resumed "
                "sweep keeps it.",
                where=name,
            )
    return spec


def _bare(setting: Any) -> Any:
    return {k: v for k, v in setting.items() if k not in HARMLESS} if isinstance(setting, Mapping) else setting


def begun_at(folder: Path) -> datetime.datetime | None:
    """When the sweep in a folder began, for its chat templates; None if not recorded."""
    return clock_of(RunFiles(folder / TRIALS).read_run())


def prepare_sweep(
    spec: SweepSpec,
    base_dir: Path,
    clock: datetime.datetime | None = None,
    *,
    begun_s: float | None = None,
    wall: WallClock | None = None,
    open_engine: OpenSweepEngine = load_engine,
    ahead: DataAhead | None = None,
) -> PreparedSweep:
    """Loads and checks everything and writes nothing; `clock` is when the sweep began, if it is resumed. A budget of
    time counts from `begun_s` of `time.perf_counter`, or from now. `wall` has counted the time since the command
    started; `open_engine` loads the engine; `ahead` prepares data meanwhile."""
    begun_s = time.perf_counter() if begun_s is None else begun_s
    space = space_of(spec)
    name = sampler_name(spec, space)
    make_sampler(spec, space)
    open_trackers(spec.report_to, Path(), "")
    if spec.storage is not None:
        from weft.sweeps.samplers import import_optuna

        import_optuna()
    objective = TrialObjective(spec.objective, base_dir)
    previous = None if spec.start_from is None else read_previous(spec, base_dir / spec.start_from)
    probes = probe_jobs(spec)
    for job in probes:
        # Missing data is found before the model is loaded.
        find_sources(job, base_dir)
    spec, engine, notes = open_engine(spec, probes, wall)
    configurations = Configurations(spec, engine.executor, base_dir, clock)
    with engine.timeline.wall.spending(Activity.PREPARING):
        if ahead is not None:
            ahead.wait_for_all()
        configurations.check(space, spec.trials)
    for data, tokenizer in zip(configurations.loaded(), configurations.read_with(), strict=True):
        if data.eval is not None:
            objective.check(data.eval.samples, tokenizer)
    return PreparedSweep(
        spec=spec,
        base_dir=base_dir,
        space=space,
        sampler_name=name,
        engine=engine,
        configurations=configurations,
        objective=objective,
        previous=previous,
        notes=notes,
        begun_s=begun_s,
    )


@contextmanager
def open_run(
    prepared: PreparedSweep, folder: Path, *, resume: bool, on_news: OnNews = lambda kind, trial, text: None
) -> Iterator[SweepRun]:
    """The sweep in its folder, ready to train; the folder is locked until the block ends."""
    spec, engine = prepared.spec, prepared.engine
    name = spec.run_name or folder.resolve().name
    trackers = open_trackers(spec.report_to, folder, name, warn=lambda text: on_news("warning", None, text))
    with (
        RunDirectory.open(folder / TRIALS, resume=resume) as directory,
        contextlib.closing(trackers),
        contextlib.ExitStack() as end,
    ):
        # The owner of the trials owns the files beside them.
        end.callback(add_guard(folder, directory.check_owned))
        # Undoes what a killed process left unfinished; no other process can be writing here now.
        remove_leftovers(folder)
        if resume:
            check_same_inputs(prepared, folder)
        copy_trial = _storage(prepared, name)
        write_file(
            folder / SETTINGS, yaml.safe_dump(resolved_sweep(spec), sort_keys=False, allow_unicode=True, width=120)
        )
        write_record(directory, spec, engine, name, prepared.configurations.clock)
        engine.keep_in(directory)
        context = SweepContext(
            **vars(prepared),
            sampler=make_sampler(spec, prepared.space),
            folder=folder,
            directory=directory,
            trackers=trackers,
            startup_s=time.perf_counter() - prepared.begun_s,
            copy_trial=copy_trial,
        )
        yield SweepRun(context, on_news)


def check_same_inputs(prepared: PreparedSweep, folder: Path) -> None:
    """Raises before a trial starts if the backbone, or what a trial reads, is not what the sweep began with. Also for
    trials that have ended: others are compared with them."""
    directory = RunFiles(folder / TRIALS)
    check_same_backbone(prepared.engine.executor, directory)
    for trial in TrialsFile(folder).read():
        if directory.checkpoints_dir(trial.name).is_dir():
            job = prepared.configurations.job(trial.name, trial.params)
            check_job_inputs(trial.name, prepared.configurations.inputs(job), directory)


def conclude(run: SweepRun) -> SweepResult:
    """Measures one-by-one training, writes the report, and returns the result."""
    ledger, engine = run.ledger, run.context.engine
    wall = engine.timeline.wall
    ledger.stop_clock()
    if run.context.spec.compare_speed and not run.is_out_of_time and can_be_alone(engine):
        # Without new training, a resumed sweep keeps the earlier measurement.
        with wall.spending(Activity.COMPUTING):
            ledger.one_by_one_seconds = one_by_one_seconds(run) or ledger.one_by_one_seconds
    ledger.write(at_once=True)
    no_report = ""

    def stop_wall() -> TimeSplit:
        wall.stop()
        return engine.time_split

    try:
        with wall.spending(Activity.WRITING):
            info = read_info(run.context.directory.path)
            write_sweep_report(run.context.folder / REPORT, ledger.board(), info, stop_wall)
    except MissingExtraError as error:
        no_report = str(error)
    # All of that took time as well; a resumed sweep adds up what is recorded.
    run.context.directory.write_time(stop_wall())
    ledger.write(at_once=True)
    board = ledger.board()
    return SweepResult(ledger.best, ledger.trials, board["trials"], run.context.folder, no_report)


def _storage(prepared: PreparedSweep, name: str) -> Callable[[Mapping[str, Any], Trial], None]:
    spec = prepared.spec
    if spec.storage is None:
        return lambda point, trial: None
    from weft.sweeps.samplers import OptunaStorage

    return OptunaStorage(spec.storage, name, prepared.space, spec.objective.is_max).add
