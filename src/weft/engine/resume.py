"""What a resumed run may change: nothing that would have changed the steps it has taken.

| change | taken over |
|---|---|
| `save_steps`, `save_minutes`, `save_total_limit`, `logging_steps`, `priority`, `tenant` | always |
| `eval_steps` | unless early stopping goes by the evaluations |
| more `max_steps` or `num_train_epochs` | if neither learning rates nor early stopping depend on where the end is |
| more jobs | always |
| anything | if the job was set aside before it could start |

Anything else is refused: the result would be neither that of the old settings nor that of the new ones.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.data.chat.chat_template import template_digest
from weft.engine.recorder import check_data
from weft.errors import ConfigError, DataError, WeftError
from weft.job_state import FINAL_STATES, JobState
from weft.settings.fields import as_named_now
from weft.spec import JobSpec, RunSpec
from weft.store.checkpoint import latest_checkpoint
from weft.store.run_dir import RunDirectory
from weft.store.run_record import RunRecord
from weft.wording import counted

if TYPE_CHECKING:
    from weft.engine.train import PreparedRun

Locate = Callable[[str], str]
"""Where a setting such as `jobs.0.adapter.r` was written."""
HARMLESS = ("save_steps", "save_minutes", "save_total_limit", "logging_steps", "priority", "tenant")
"""Settings of a job that change when things are done and written, not what comes out."""
LENGTHS = ("max_steps", "num_train_epochs")
FLAT_SCHEDULES = ("constant", "constant_with_warmup", "inverse_sqrt")
"""Learning rates that do not depend on how many steps are to come."""
_KEEPS = "the run in {} has {}, this {} has {}; a resumed run keeps its settings."


@dataclass(frozen=True)
class ResumePlan:
    """How a run goes on."""

    done: frozenset[str]
    """Jobs that need no more work."""
    changes: tuple[str, ...] = ()
    """What is otherwise than when the run began, and is taken over."""


def job_settings(job: JobSpec) -> dict[str, Any]:
    """A job's settings as JSON gives them back."""
    settings: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(job)))
    return settings


def plan_resume(spec: RunSpec, directory: RunDirectory, *, locate: Locate = str) -> ResumePlan:
    """What is left to do of a run, and which of its settings change; ConfigError for one that cannot.

    A job that failed before it could start, such as one set aside for its data, gets another try.
    """
    _check_run(spec, directory, locate)
    done, changes = set(), []
    for place, job in enumerate(spec.jobs):
        recorded, status = directory.read_job(job.name), directory.read_status(job.name) or {}
        if recorded is None:
            changes.append(f"{job.name} is new")
            continue
        if status.get("can_retry") and latest_checkpoint(directory.checkpoints_dir(job.name))[0] is None:
            # It has taken no step that a setting could have changed; what kept it from starting may be corrected.
            changed = _changed(job, recorded)
        else:
            changed = check_settings(job, recorded, status, locate=_within(f"jobs.{place}", locate))
        now = _flat(job_settings(job))
        changes += [f"{job.name}: {s} {json.dumps(was)} -> {json.dumps(now[s])}" for s, was in changed.items()]
        if status.get("state") in FINAL_STATES and not status.get("can_retry") and not _has_more_to_do(changed, status):
            done.add(job.name)
    return ResumePlan(frozenset(done), tuple(changes))


def check_settings(
    job: JobSpec, recorded: Mapping[str, Any], status: Mapping[str, Any], *, locate: Locate
) -> dict[str, Any]:
    """The settings that a job goes on with otherwise, and what they were; ConfigError for one that cannot change."""
    changed, now = _changed(job, recorded), _flat(job_settings(job))
    for setting, was in changed.items():
        reason = _refusal(setting, was, job, recorded, status)
        if reason is not None:
            found = f"was {json.dumps(was)} and is {json.dumps(now[setting])}"
            raise ConfigError(f"{found}; {reason}.", where=locate(setting))
    return changed


def _within(place: str, locate: Locate) -> Locate:
    """Where a setting inside a place was written."""
    return lambda setting: locate(f"{place}.{setting}")


def check_recorded(job: JobSpec, directory: RunDirectory) -> None:
    """ConfigError if a job of an engine has other settings than the directory has of it, and cannot."""
    recorded, status = directory.read_job(job.name), directory.read_status(job.name) or {}
    if recorded is not None:
        check_settings(job, recorded, status, locate=lambda setting: f"{job.name}.{setting}")


def open_run_directory(path: Path, now: RunRecord, jobs: Sequence[JobSpec], *, any_capacity: bool) -> RunDirectory:
    """Takes a directory for the run of an engine, or for the run it holds, and records the engine's jobs so far.

    ConfigError if the run in it began on another backbone, with another capacity or with other settings of a job; with
    `any_capacity` it may go on with another capacity.
    """
    holds_run = RunDirectory.holds_run(path)
    directory = RunDirectory.open(path, resume=holds_run)
    try:
        if holds_run:
            _check_engine(now, directory, any_capacity)
            for job in jobs:
                check_recorded(job, directory)
        else:
            directory.write_run(dataclasses.replace(now, run_name=path.resolve().name))
        for job in jobs:
            directory.write_job(job.name, job_settings(job))
    except WeftError:
        directory.close()
        raise
    return directory


def with_recorded_capacity(spec: RunSpec, directory: RunDirectory) -> RunSpec:
    """A resumed run with the capacity it began with, where the file leaves it to Weft."""
    recorded = directory.read_run().capacity
    return dataclasses.replace(spec, capacity=recorded) if spec.capacity == "auto" and recorded else spec


def check_same_data(run: PreparedRun, directory: RunDirectory) -> None:
    """Refuses to resume jobs on other data than their checkpoints were trained on, before anything is changed."""
    digest = directory.read_run().template_digest
    for name, data in run.data.items():
        checkpoint, _ = latest_checkpoint(directory.checkpoints_dir(name))
        if checkpoint is None:
            continue
        try:
            check_data(checkpoint, data, name)
        except DataError:
            if digest in (None, template_digest(run.engine.executor.tokenizer)):
                found = "train_data is not what the checkpoint was trained on"
                raise DataError(f"{found}; start a new run.", where=name) from None
            found = f"the chat template of {run.spec.base_model} is not the one that the run began with"
            raise DataError(f"{found}; put that back, or start a new run.", where=name) from None


def _check_run(spec: RunSpec, directory: RunDirectory, locate: Locate) -> None:
    """ConfigError if the whole run changes, or one of its jobs is gone."""
    record = directory.read_run()
    recorded: dict[str, Any] = {**record.to_json(), "quantize": record.quantize or "none"}
    now_set = {name: getattr(spec, name) for name in ("base_model", "quantize", "capacity")}
    if spec.capacity == "auto":
        # What it was when the run began, wherever it goes on.
        del now_set["capacity"]
    for setting, now in now_set.items():
        if recorded.get(setting) != now:
            found = _KEEPS.format(directory.path, recorded.get(setting), "file", now)
            raise ConfigError(found, where=locate(setting))
    names = [job.name for job in spec.jobs]
    gone = [name for name in record.jobs if name not in names]
    if gone:
        raise ConfigError(
            f"the run in {directory.path} has {', '.join(gone)}, this file has {', '.join(names)}; a resumed run keeps "
            "its jobs and may have more.",
            where=locate("jobs"),
        )


def _check_engine(now: RunRecord, directory: RunDirectory, any_capacity: bool) -> None:
    """ConfigError if an engine has another backbone or capacity than the run that it is to go on with."""
    recorded = directory.read_run()
    pairs = {"base_model": (recorded.base_model, now.base_model), "capacity": (recorded.capacity, now.capacity)}
    for setting, (was, asked) in pairs.items():
        if was not in (None, asked) and not (any_capacity and setting == "capacity"):
            raise ConfigError(_KEEPS.format(directory.path, was, "engine", asked), where=setting)


def _changed(job: JobSpec, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a job that are not as they were recorded, and what they were."""
    before = _flat(as_named_now(JobSpec, recorded))
    # A setting that the run was recorded without did not exist then.
    return {name: before[name] for name, now in _flat(job_settings(job)).items() if before.get(name, now) != now}


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a job with those of its adapter beside them, as `adapter.r`."""
    own = {name: value for name, value in settings.items() if name != "adapter"}
    return own | {f"adapter.{name}": value for name, value in settings.get("adapter", {}).items()}


def _refusal(
    setting: str, was: Any, job: JobSpec, recorded: Mapping[str, Any], status: Mapping[str, Any]
) -> str | None:
    """Why a setting cannot change; None if it can."""
    stops_early = recorded.get("early_stopping_patience") is not None
    if setting in HARMLESS:
        return None
    if setting == "eval_steps":
        return "early stopping goes by the evaluations" if stops_early else None
    if setting not in LENGTHS:
        return "a resumed job keeps its settings"
    if job.lr_scheduler_type not in FLAT_SCHEDULES or 0 < job.warmup_steps < 1:
        what = (
            "warmup_steps as a fraction" if 0 < job.warmup_steps < 1 else f"lr_scheduler_type {job.lr_scheduler_type}"
        )
        return f"with {what} the steps taken would have had other learning rates"
    if stops_early:
        return "early stopping goes by the last evaluation too"
    done = int(status.get("step") or 0)
    if setting == "max_steps" and (job.max_steps is None or job.max_steps < done):
        return f"{counted(done, 'step')} {'is' if done == 1 else 'are'} done, and a resumed job takes at least as many"
    if setting == "num_train_epochs" and job.max_steps is None and job.num_train_epochs < was:
        return "a resumed job trains at least as long as it was to"
    return None


def _has_more_to_do(changed: Mapping[str, Any], status: Mapping[str, Any]) -> bool:
    """Whether a job that has ended has more to do now."""
    return status.get("state") == JobState.SUCCEEDED and any(setting in changed for setting in LENGTHS)
