"""What an earlier sweep found: read from its folder, so that nothing is trained twice and samplers start informed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.engine.resume import job_settings
from weft.errors import ConfigError
from weft.settings.fields import as_named_now
from weft.spec import JobSpec
from weft.spec.sweep import SweepSpec
from weft.store import json_text
from weft.store.atomic import storage_errors
from weft.sweeps.record.leaderboard import read_board
from weft.sweeps.record.trials_file import FILE, Trial, TrialsFile, TrialState

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
"""Settings that change nothing in what a job learns."""


@dataclass(frozen=True)
class PreviousSweep:
    """An earlier sweep's trials, and where each was trained."""

    trials: tuple[Trial, ...]
    homes: dict[str, Path]
    """By the key of a configuration, the directory of the trial that was trained to its end with it."""
    by_home: dict[Path, Trial]

    def same_as(self, job: JobSpec) -> tuple[Path, Trial] | None:
        """The trial that was trained to its end with the settings of a job, and its directory."""
        home = self.homes.get(_key(job_settings(job)))
        return None if home is None else (home, self.by_home[home])


def read_previous(spec: SweepSpec, folder: Path) -> PreviousSweep:
    """Reads the folder that `start_from` names; a ConfigError says why its values mean nothing here."""
    if not (folder / FILE).is_file():
        raise ConfigError(f"{folder} holds no sweep.", where="start_from")
    board = read_board(folder)
    found = (board.get("metric"), board.get("mode"))
    if found != (spec.objective.name, spec.objective.mode):
        raise ConfigError(
            f"{folder} was judged by {found[0]} ({found[1]}), this sweep by {spec.objective.name} "
            f"({spec.objective.mode}).",
            where="start_from",
        )
    trials = [trial for trial in TrialsFile(folder).read() if trial.state.is_final]
    homes: dict[str, Path] = {}
    by_home: dict[Path, Trial] = {}
    run = _read(folder / "trials" / "run.json")
    is_same_run = (run.get("base_model"), run.get("quantize", "none")) == (spec.base_model, spec.quantize)
    for trial in trials:
        home = Path(trial.origin) if trial.origin else folder / "trials" / trial.name
        if is_same_run and trial.state is TrialState.DONE and (home / "job.json").is_file():
            homes.setdefault(_key(as_named_now(JobSpec, _read(home / "job.json"))), home)
            by_home[home] = trial
    return PreviousSweep(tuple(trials), homes, by_home)


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
