"""A sweep's stored results: trials, leaderboard, best adapter, and those of an earlier sweep."""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from weft.data.sources import is_pattern
from weft.engine.resume import job_settings
from weft.errors import ConfigError
from weft.settings import as_named_now
from weft.spec import JobSpec, RunSpec
from weft.spec.job import SourceSpec
from weft.spec.load_sweep import space_of
from weft.spec.space import Range
from weft.spec.sweep import SweepSpec
from weft.store import json_text
from weft.store.atomic import staged_directory, storage_errors, write_file, write_unsynced
from weft.store.run_dir import RunDirectory
from weft.sweeps.trials_file import FILE, Trial, TrialsFile, TrialState

BOARD = "leaderboard.json"
TRIALS = "trials"
"""Directory of a sweep's trials, each a job of one run."""
MAX_LOSSES = 500
_ORDER = {
    TrialState.DONE: 0,
    TrialState.TRAINING: 0,
    TrialState.STOPPED: 1,
    TrialState.WAITING: 2,
    TrialState.FAILED: 3,
}
"""Rank by state: stopped trials come after all others with a value."""


@dataclass(frozen=True)
class Totals:
    sampler: str
    seconds: float
    tokens: int
    one_by_one_seconds: float | None = None
    time: Mapping[str, float] | None = None
    """Wall-clock time by activity, as `TimeSplit` writes it."""
    num_packs: int = 0
    """Packs of the plan; 0 if there was none."""
    predicted_ends: Sequence[tuple[float, float]] = field(default_factory=list)
    """Predictions of `seconds`: when each was made, and what it was."""


def ranked(trials: Sequence[Trial], is_max: bool) -> list[Trial]:
    sign = -1 if is_max else 1
    return sorted(trials, key=lambda t: (_ORDER[t.state], t.value is None, sign * (t.value or 0.0), t.number))


def best_of(trials: Sequence[Trial], is_max: bool, folder: Path) -> Trial | None:
    ended = [t for t in trials if t.state in (TrialState.DONE, TrialState.STOPPED) and t.value is not None]
    return next((trial for trial in ranked(ended, is_max) if adapter_of(folder, trial).is_dir()), None)


def adapter_of(folder: Path, trial: Trial) -> Path:
    return (Path(trial.origin) if trial.origin else folder / TRIALS / trial.name) / "adapter"


def board_of(spec: SweepSpec, trials: Sequence[Trial], totals: Totals, *, with_curves: bool = True) -> dict[str, Any]:
    """The leaderboard as plain data, with or without curves."""
    rows = [_row(rank, trial) for rank, trial in enumerate(ranked(trials, spec.objective.is_max), start=1)]
    if not with_curves:
        rows = [{**row, "points": [], "losses": []} for row in rows]
    ranges = [parameter for parameter in space_of(spec).parameters if isinstance(parameter, Range)]
    scales = {parameter.name: "log" if parameter.log else "linear" for parameter in ranges}
    about = {"metric": spec.objective.name, "mode": spec.objective.mode, **asdict(totals), "scales": scales}
    return {**about, "trials": rows}


def write_board(folder: Path, board: dict[str, Any]) -> None:
    write_file(folder / BOARD, _json(board) + "\n")
    names = list(dict.fromkeys(name for row in board["trials"] for name in row["params"]))
    plain = ("rank", "name", "state", "value", "steps", "total_steps", "tokens", "seconds", "reason")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*plain[:4], *names, *plain[4:]])
    for row in board["trials"]:
        params = [_cell(row["params"].get(name)) for name in names]
        writer.writerow([*(_cell(row[key]) for key in plain[:4]), *params, *(_cell(row[key]) for key in plain[4:])])
    write_file(folder / "leaderboard.csv", text.getvalue())


def write_best(folder: Path, trial: Trial, job: JobSpec, spec: SweepSpec, base_dir: Path) -> None:
    with staged_directory(folder / "best") as staged:
        for file in sorted(adapter_of(folder, trial).iterdir()):
            shutil.copyfile(file, staged / file.name)
        write_unsynced(staged / "jobs.yaml", jobs_file(job, spec, base_dir, folder))


def jobs_file(job: JobSpec, spec: SweepSpec, base_dir: Path, folder: Path) -> str:
    """A jobs file for one configuration, with absolute paths, so that it works anywhere."""
    plain = RunSpec(spec.base_model, (job,), capacity=spec.capacity)
    own = {f.name: getattr(spec, f.name) for f in fields(RunSpec) if f.name not in ("jobs", "defaults", "output_dir")}
    run = {name: value for name, value in own.items() if name == "capacity" or value != getattr(plain, name)}
    bare = job_settings(JobSpec(job.name, job.train_data))
    settings = {name: value for name, value in job_settings(job).items() if value != bare[name]}
    settings["adapter"] = {name: v for name, v in job_settings(job)["adapter"].items() if v != bare["adapter"][name]}
    for name in ("train_data", "eval_data"):
        value = getattr(job, name)
        if isinstance(value, tuple):
            settings[name] = [_whole_source(source, base_dir) for source in value]
    named = {"init_adapter": job.init_adapter, "reference": job.reference, "teacher": job.teacher}
    settings |= {name: _whole_path(path, base_dir) for name, path in named.items() if path not in (None, "base")}
    base_model = {"base_model": spec.base_model, "output_dir": f"{spec.output_dir}-best"}
    tree = {**base_model, **json.loads(json.dumps(run)), "jobs": [{"name": "best", **settings}]}
    head = f"# {job.name} of the sweep in {folder.name}; train it again with: weft train jobs.yaml\n"
    return head + yaml.safe_dump(tree, sort_keys=False, width=120, allow_unicode=True)


def read_losses(directory: RunDirectory, name: str) -> list[tuple[int, float]]:
    path = directory.metrics_path(name)
    losses: list[tuple[int, float]] = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            record = json_text.parse(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("loss"), float):
            losses.append((record["step"], record["loss"]))
    return losses


def _json(board: dict[str, Any]) -> str:
    try:
        return json.dumps(board, allow_nan=False)
    except ValueError:
        # Checking every number of every curve takes longer than writing them, so it is done only if needed.
        return json.dumps(json_text.finite(board), allow_nan=False)


def _whole_source(source: str | SourceSpec, base_dir: Path) -> str | dict[str, Any]:
    if isinstance(source, str):
        return _whole_path(source, base_dir)
    given = {name: value for name, value in asdict(source).items() if value not in (None, False)}
    return {**given, "path": _whole_path(source.path, base_dir)}


def _whole_path(source: str, base_dir: Path) -> str:
    path = base_dir / source
    if path.exists():
        return str(path.resolve())
    return str(base_dir.resolve() / source) if is_pattern(source) else source


def _row(rank: int, trial: Trial) -> dict[str, Any]:
    every = -(-len(trial.losses) // MAX_LOSSES) or 1
    thinned = [pair for i, pair in enumerate(reversed(trial.losses)) if i % every == 0][::-1]
    return {
        "rank": rank,
        "number": trial.number,
        "name": trial.name,
        "state": str(trial.state),
        "reason": trial.reason,
        "value": None if trial.state is TrialState.FAILED else trial.value,
        "params": trial.params,
        "steps": trial.steps,
        "total_steps": trial.total_steps,
        "tokens": trial.tokens,
        "seconds": trial.seconds,
        "started_s": trial.started_s,
        "ended_s": trial.ended_s,
        "points": [asdict(point) for point in trial.points],
        "losses": [list(pair) for pair in thinned],
        "origin": trial.origin,
    }


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | tuple | dict) else value


_CADENCE = (
    "name",
    "eval_steps",
    "save_steps",
    "save_minutes",
    "save_total_limit",
    "logging_steps",
    "priority",
    "tenant",
)
"""Settings that do not affect what a job learns."""


@dataclass(frozen=True)
class PreviousSweep:
    trials: tuple[Trial, ...]
    trained: dict[str, tuple[Path, Trial]]
    """Completely trained trials and their directories, by the key of their configuration."""

    def same_as(self, job: JobSpec) -> tuple[Path, Trial] | None:
        """The directory and trial that was trained to its end with the same settings; None if there is none."""
        return self.trained.get(_key(job_settings(job)))


def read_previous(spec: SweepSpec, folder: Path) -> PreviousSweep:
    """Reads the sweep that `start_from` names; a ConfigError if its values are not comparable."""
    if not (folder / FILE).is_file():
        raise ConfigError(f"{folder} holds no sweep.", where="start_from")
    board = json_text.read_object(folder / BOARD)
    found = (board.get("metric"), board.get("mode"))
    if found != (spec.objective.name, spec.objective.mode):
        raise ConfigError(
            f"{folder} was scored by {found[0]} ({found[1]}), this sweep is by {spec.objective.name} "
            f"({spec.objective.mode}).",
            where="start_from",
        )
    trials = [trial for trial in TrialsFile(folder).read() if trial.state.is_final]
    trained: dict[str, tuple[Path, Trial]] = {}
    run = _read(folder / "trials" / "run.json")
    is_same_run = (run.get("base_model"), run.get("quantize", "none")) == (spec.base_model, spec.quantize)
    for trial in trials:
        home = Path(trial.origin) if trial.origin else folder / "trials" / trial.name
        if is_same_run and trial.state is TrialState.DONE and (home / "job.json").is_file():
            trained.setdefault(_key(as_named_now(JobSpec, _read(home / "job.json"))), (home, trial))
    return PreviousSweep(tuple(trials), trained)


def _key(settings: dict[str, Any]) -> str:
    return json.dumps({name: value for name, value in settings.items() if name not in _CADENCE}, sort_keys=True)


def _read(path: Path) -> dict[str, Any]:
    with storage_errors(path):
        data = path.read_bytes() if path.exists() else b"{}"
    try:
        value = json_text.parse(data)
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}.", where="start_from") from None
    return value if isinstance(value, dict) else {}
