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

from weft.data.chat_template import template_digest
from weft.engine.recorder import check_backbone, check_inputs
from weft.errors import ConfigError, WeftError, counted
from weft.job_state import FINAL_STATES, JobState
from weft.settings import as_named_now
from weft.spec import JobSpec, RunSpec
from weft.store.checkpoint import latest_checkpoint, newest_content
from weft.store.run_dir import RunDirectory, RunFiles, RunRecord

if TYPE_CHECKING:
    from weft.engine.jobs.live_job import LiveJob
    from weft.engine.run_engine import ReplicaSide
    from weft.engine.train import PreparedRun

Locate = Callable[[str], str]
"""Maps a setting such as `jobs.0.adapter.r` to where it was written."""
HARMLESS = ("save_steps", "save_minutes", "save_total_limit", "logging_steps", "priority", "tenant")
"""Settings that change when work is done and written, not its results."""
LENGTHS = ("max_steps", "num_train_epochs")
FLAT_SCHEDULES = ("constant", "constant_with_warmup", "inverse_sqrt")
_KEEPS = "the run in {} has {}, this {} has {}; a resumed run keeps its settings."


@dataclass(frozen=True)
class ResumePlan:
    done: frozenset[str]
    changes: tuple[str, ...] = ()


def job_settings(job: JobSpec) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(job)))
    return settings


def plan_resume(spec: RunSpec, directory: RunFiles, *, locate: Locate = str) -> ResumePlan:
    """Finished jobs of a run and its accepted changes; ConfigError for a change that is not possible. A job that failed
    before it could start, such as one set aside for its data, gets another try."""
    _check_run(spec, directory, locate)
    done, changes = set(), []
    for index, job in enumerate(spec.jobs):
        recorded, status = directory.read_job(job.name), directory.read_status(job.name) or {}
        if recorded is None:
            changes.append(f"{job.name} is new")
            continue
        if status.get("can_retry") and latest_checkpoint(directory.checkpoints_dir(job.name))[0] is None:
            # It has taken no step that a setting could have changed.
            changed = _changed(job, recorded)
        else:
            changed = check_settings(job, recorded, status, locate=_within(f"jobs.{index}", locate))
        now = _flat(job_settings(job))
        changes += [f"{job.name}: {s} {json.dumps(was)} -> {json.dumps(now[s])}" for s, was in changed.items()]
        if status.get("state") in FINAL_STATES and not status.get("can_retry") and not _has_more_to_do(changed, status):
            done.add(job.name)
    return ResumePlan(frozenset(done), tuple(changes))


def check_settings(
    job: JobSpec, recorded: Mapping[str, Any], status: Mapping[str, Any], *, locate: Locate
) -> dict[str, Any]:
    """Recorded values of the settings that change; ConfigError for one that cannot."""
    changed, now = _changed(job, recorded), _flat(job_settings(job))
    for setting, was in changed.items():
        reason = _refusal(setting, was, job, recorded, status)
        if reason is not None:
            found = f"was {json.dumps(was)} and is {json.dumps(now[setting])}"
            raise ConfigError(f"{found}; {reason}.", where=locate(setting))
    return changed


def _within(prefix: str, locate: Locate) -> Locate:
    return lambda setting: locate(f"{prefix}.{setting}")


def check_recorded(job: JobSpec, directory: RunFiles) -> None:
    """ConfigError if an engine's job has changed settings that cannot change."""
    recorded, status = directory.read_job(job.name), directory.read_status(job.name) or {}
    if recorded is not None:
        check_settings(job, recorded, status, locate=lambda setting: f"{job.name}.{setting}")


def open_run_directory(
    path: Path, now: RunRecord, jobs: Sequence[LiveJob], replica: ReplicaSide, *, any_capacity: bool
) -> RunDirectory:
    """Opens a directory for a new run of an engine, or for the run it holds, and records the engine's jobs. Raises if
    its run has another backbone or capacity, or other settings or inputs of a job; `any_capacity` accepts any
    capacity."""
    holds_run = RunDirectory.holds_run(path)
    directory = RunDirectory.open(path, resume=holds_run)
    try:
        if holds_run:
            _check_engine(now, directory, any_capacity)
            check_same_backbone(replica, directory)
            for job in jobs:
                check_recorded(job.submitted, directory)
                check_job_inputs(job.name, job.inputs, directory)
        else:
            directory.write_run(dataclasses.replace(now, run_name=path.resolve().name))
        for job in jobs:
            directory.write_job(job.name, job_settings(job.submitted))
    except WeftError:
        directory.close()
        raise
    return directory


def with_recorded_capacity(spec: RunSpec, directory: RunFiles) -> RunSpec:
    """The run with its recorded capacity, where the file sets `auto`."""
    recorded = directory.read_run().capacity
    return dataclasses.replace(spec, capacity=recorded) if spec.capacity == "auto" and recorded else spec


def check_same_inputs(run: PreparedRun, directory: RunFiles) -> None:
    """Raises before anything is written if the backbone, or what a job reads, is not what the run began with."""
    check_same_backbone(run.engine.executor, directory)
    for name, job in run.engine.jobs.items():
        check_job_inputs(name, job.inputs, directory)


def check_same_backbone(replica: ReplicaSide, directory: RunFiles) -> None:
    """CheckpointError if the run in a directory has trained on another backbone, also for jobs that have ended."""
    environment = replica.facts.environment
    digest = directory.read_run().template_digest
    if digest is not None:
        # Versions that recorded no digests of other files recorded this one.
        here = {**environment, "chat_template": template_digest(replica.tokenizer)}
        check_backbone({"chat_template": digest}, here, str(directory.path))
    for name in directory.recorded_jobs():
        found = newest_content(directory.checkpoints_dir(name))
        if found is not None:
            check_backbone(found[1], environment, name)


def check_job_inputs(name: str, inputs: Mapping[str, Any], directory: RunFiles) -> None:
    found = newest_content(directory.checkpoints_dir(name))
    if found is not None:
        check_inputs(found[0], inputs, name)


def _check_run(spec: RunSpec, directory: RunFiles, locate: Locate) -> None:
    """ConfigError if a setting of the whole run changes, or a job is missing."""
    record = directory.read_run()
    recorded: dict[str, Any] = {**record.to_json(), "quantize": record.quantize or "none"}
    now_set = {name: getattr(spec, name) for name in ("base_model", "quantize", "capacity")}
    if spec.capacity == "auto":
        # It stays what it was when the run began.
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


def _check_engine(now: RunRecord, directory: RunFiles, any_capacity: bool) -> None:
    recorded = directory.read_run()
    pairs = {"base_model": (recorded.base_model, now.base_model), "capacity": (recorded.capacity, now.capacity)}
    for setting, (was, wanted) in pairs.items():
        if was not in (None, wanted) and not (any_capacity and setting == "capacity"):
            raise ConfigError(_KEEPS.format(directory.path, was, "engine", wanted), where=setting)


def _changed(job: JobSpec, recorded: Mapping[str, Any]) -> dict[str, Any]:
    before = _flat(as_named_now(JobSpec, recorded))
    # A setting that the run was recorded without did not exist then.
    return {name: before[name] for name, now in _flat(job_settings(job)).items() if before.get(name, now) != now}


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A job's settings with its adapter's beside them, as `adapter.r`."""
    own = {name: value for name, value in settings.items() if name != "adapter"}
    return own | {f"adapter.{name}": value for name, value in settings.get("adapter", {}).items()}


def _refusal(
    setting: str, was: Any, job: JobSpec, recorded: Mapping[str, Any], status: Mapping[str, Any]
) -> str | None:
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
    return status.get("state") == JobState.SUCCEEDED and any(setting in changed for setting in LENGTHS)
