"""A resumed run takes over what cannot have changed its steps, reports it, and refuses the rest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tiny_models import job_spec, random_data, shallow_backbone

from weft.data.dataset import JobData
from weft.engine.engine import Engine
from weft.engine.resume import ResumePlan, plan_resume
from weft.engine.train import execute_run, prepare_run
from weft.errors import CheckpointError, ConfigError, DataError
from weft.job_state import JobState
from weft.model.backbone import Backbone
from weft.spec import JobSpec, RunSpec, run_from_mapping
from weft.store.run_dir import RunDirectory

FLAT = {"max_steps": 3, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2, "global_batch_size": 2}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [{"prompt": f"name {i}", "completion": f"{i} it is"} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = [{"text": f"name {i}", "label": i % 3} for i in range(8)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    return tmp_path


def run_of(folder: Path, **jobs: Mapping[str, Any]) -> RunSpec:
    made = [
        {"name": name, "train_data": str(folder / "rows.jsonl"), "adapter": {"r": 2}, **settings}
        for name, settings in jobs.items()
    ]
    return run_from_mapping({"base_model": "tiny", "jobs": made})


def train(spec: RunSpec, folder: Path, name: str) -> ResumePlan:
    """Runs, or resumes, what is in a directory."""
    path = folder / name
    resume = RunDirectory.holds_run(path)
    with RunDirectory.open(path, resume=resume) as directory:
        plan = plan_resume(spec, directory) if resume else ResumePlan(frozenset())
        run = prepare_run(spec, base_dir=folder, skip=plan.done)
        execute_run(run, directory, on_event=lambda event: None)
    return plan


def adapter(folder: Path, run: str, job: str) -> bytes:
    return (folder / run / job / "adapter" / "adapter_model.safetensors").read_bytes()


def test_resume_when_there_are_more_steps_and_jobs_then_all_end_as_if_begun_so(folder: Path):
    """To the bit, also for a job that had ended; what is taken over is reported."""
    texts = {**FLAT, "train_data": str(folder / "texts.jsonl"), "objective": "classification"}
    train(run_of(folder, a=FLAT, b={"max_steps": 2}, t=texts), folder, "short")
    more = {"a": {**FLAT, "max_steps": 5}, "t": {**texts, "max_steps": 5}}
    longer = run_of(folder, b={"max_steps": 2, "save_steps": 1}, **more, c={"max_steps": 1})
    plan = train(longer, folder, "short")
    assert plan.done == {"b"}
    assert plan.changes == ("b: save_steps 100 -> 1", "a: max_steps 3 -> 5", "t: max_steps 3 -> 5", "c is new")
    train(longer, folder, "whole")
    assert all(adapter(folder, "short", job) == adapter(folder, "whole", job) for job in "abct")


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "other rates": ({"max_steps": 3}, {"max_steps": 5}, "max_steps: was 3 and is 5; with lr_scheduler_type linear the"),
    "warm-up by share": (
        {**FLAT, "warmup_steps": 0.5},
        {**FLAT, "warmup_steps": 0.5, "max_steps": 5},
        "warmup_steps as a fraction",
    ),
    "fewer steps": (FLAT, {**FLAT, "max_steps": 2}, "3 steps are done"),
    "early stop": (
        {**FLAT, "eval_data": 2, "early_stopping_patience": 2, "eval_steps": 1},
        {**FLAT, "eval_data": 2, "early_stopping_patience": 2, "eval_steps": 2},
        "early stopping goes by the evaluations",
    ),
    "learning rate": (FLAT, {**FLAT, "learning_rate": 1e-3}, "a resumed job keeps its settings"),
}


@pytest.mark.parametrize(("was", "now", "problem"), CASES.values(), ids=CASES)
def test_resume_when_a_change_would_have_changed_steps_then_it_is_refused(folder: Path, was, now, problem):
    recorded, status = run_of(folder, a=was), {"state": "succeeded", "step": 3}
    with RunDirectory.open(folder / "out", resume=False) as directory:
        _record(recorded, directory, status)
        assert plan_resume(recorded, directory) == ResumePlan(frozenset({"a"}))
        with pytest.raises(ConfigError, match=problem):
            plan_resume(run_of(folder, a=now), directory)


def test_resume_when_a_setting_was_recorded_under_its_former_name_then_it_has_not_changed(folder: Path):
    spec = run_of(folder, a={**FLAT, "gradient_sum": "any_order"})
    with RunDirectory.open(folder / "out", resume=False) as directory:
        _record(spec, directory, {"state": "succeeded", "step": 3})
        path = directory.path / "a" / "job.json"
        recorded = json.loads(path.read_text())
        assert recorded.pop("gradient_sum") == "any_order"
        path.write_text(json.dumps({**recorded, "sums": "free"}))
        assert plan_resume(spec, directory) == ResumePlan(frozenset({"a"}))
        with pytest.raises(ConfigError, match='gradient_sum: was "any_order" and is "in_order"'):
            plan_resume(run_of(folder, a=FLAT), directory)


def test_resume_when_epochs_are_fewer_or_steps_no_longer_stated_then_it_is_refused(folder: Path):
    epochs = {"lr_scheduler_type": "constant", "num_train_epochs": 2}
    with RunDirectory.open(folder / "out", resume=False) as directory:
        _record(run_of(folder, a=epochs), directory, {"state": "paused", "step": 1})
        more = plan_resume(run_of(folder, a={**epochs, "num_train_epochs": 3}), directory)
        assert more.changes == ("a: num_train_epochs 2.0 -> 3.0",)
        with pytest.raises(ConfigError, match="at least as long"):
            plan_resume(run_of(folder, a={**epochs, "num_train_epochs": 1}), directory)
        _record(run_of(folder, a=FLAT), directory, {"state": "paused", "step": 1})
        with pytest.raises(ConfigError, match="takes at least as many"):
            plan_resume(run_of(folder, a={**FLAT, "max_steps": None}), directory)


def engine_on(path: Path, *, before: JobSpec | None = None, base_model: str = "llama", capacity: int = 512) -> Engine:
    """An engine that keeps its run in a directory; a job may be there before that."""
    engine = Engine(shallow_backbone(base_model), capacity=capacity)
    if before is not None:
        engine.submit(before, random_data(1))
    engine.keep_in(path)
    return engine


def files(path: Path) -> dict[str, bytes]:
    """All files but those that name the run's owner."""
    found = {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}
    return {name: data for name, data in found.items() if not name.startswith((".lock", ".owner-"))}


@pytest.mark.parametrize("is_first", [False, True])
def test_engine_when_a_job_of_its_directory_has_changed_then_refused_as_by_train(tmp_path: Path, is_first: bool):
    """Whether the job or the directory is named first; nothing in the directory changes."""
    first = engine_on(tmp_path / "run", before=job_spec("a", max_steps=2) if is_first else None)
    if not is_first:
        first.submit(job_spec("a", max_steps=2), random_data(1))
    first.run()
    first._keeper.run_dir.close()
    kept = files(tmp_path / "run")
    other = job_spec("a", max_steps=2, learning_rate=0.5)
    with pytest.raises(ConfigError, match=r"^a\.learning_rate: was .* and is 0.5; a resumed job keeps its settings\.$"):
        engine_on(tmp_path / "run", before=other if is_first else None).submit(other, random_data(1))
    assert files(tmp_path / "run") == kept


def test_engine_when_a_harmless_setting_of_its_job_has_changed_then_taken_over(tmp_path: Path):
    first = engine_on(tmp_path / "run", before=job_spec("a", max_steps=2))
    first.run()
    first._keeper.run_dir.close()
    engine_on(tmp_path / "run", before=job_spec("a", max_steps=2, logging_steps=7)).run()
    assert json.loads((tmp_path / "run" / "a" / "job.json").read_text())["logging_steps"] == 7


@pytest.mark.parametrize(("setting", "was", "now"), [("base_model", "llama", "mistral"), ("capacity", 512, 256)])
def test_engine_when_its_directory_began_with_another_then_refused(tmp_path: Path, setting: str, was: Any, now: Any):
    """The directory is let go, so that the right engine can have it."""
    engine_on(tmp_path / "run", **{setting: was})._keeper.run_dir.close()
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"^{setting}: the run in .* has {was}, this engine has {now}; a resumed"):
            engine_on(tmp_path / "run", **{setting: now})


def engine_of(path: Path, backbone: Backbone) -> Engine:
    engine = Engine(backbone, capacity=64)
    engine.keep_in(path)
    return engine


@pytest.mark.parametrize("is_first", [False, True])
def test_engine_when_the_evaluation_data_of_its_job_is_other_then_refused(tmp_path: Path, is_first: bool):
    """Whether the job or the directory is named first; nothing in the directory changes."""
    spec = job_spec("a", max_steps=2, eval_steps=2)
    first = engine_of(tmp_path / "run", shallow_backbone())
    first.submit(spec, random_data(1, num_eval=3))
    first.run()
    first._keeper.run_dir.close()
    kept = files(tmp_path / "run")
    other = JobData(random_data(1, num_eval=3).train, random_data(2, num_eval=3).eval)
    again = Engine(shallow_backbone(), capacity=64)
    if is_first:
        again.submit(spec, other)
    refusal = pytest.raises(DataError, match=r"^a: eval_data is not what the run began with; put that back")
    if is_first:
        with refusal:
            again.keep_in(tmp_path / "run")
    else:
        again.keep_in(tmp_path / "run")
        with refusal:
            again.submit(spec, other)
        again._keeper.run_dir.close()
    assert files(tmp_path / "run") == kept


def test_engine_when_its_directory_is_of_other_weights_then_refused(tmp_path: Path):
    """Also for a job that has ended."""
    backbone = shallow_backbone()
    backbone.digests = {"weights": "one"}
    first = engine_of(tmp_path / "run", backbone)
    first.submit(job_spec("a", max_steps=2), random_data(1))
    first.run()
    first._keeper.run_dir.close()
    backbone.digests = {"weights": "other"}
    with pytest.raises(CheckpointError, match=r"^a: the base model has changed since the run began \(weights\)"):
        engine_of(tmp_path / "run", backbone)
    backbone.digests = {}
    engine_of(tmp_path / "run", backbone)._keeper.run_dir.close()


def test_job_when_its_inputs_change_after_all_checks_then_a_resumed_run_starts_it_again(folder: Path):
    """Such as on another machine: the job fails, and is not ended for good."""
    spec = run_of(folder, a={**FLAT, "save_steps": 1, "eval_data": str(folder / "rows.jsonl")})
    train(spec, folder, "out")
    with RunDirectory.open(folder / "out", resume=True) as directory:
        directory.write_status("a", JobState.RUNNING, step=3)
        run = prepare_run(spec, base_dir=folder)
        good = run.engine.jobs["a"].inputs["eval_data"]
        run.engine.jobs["a"].inputs["eval_data"] = "other"
        assert execute_run(run, directory, on_event=lambda event: None) == {"a": JobState.FAILED}
        run = prepare_run(spec, base_dir=folder, skip=plan_resume(spec, directory).done)
        assert run.engine.jobs["a"].inputs["eval_data"] == good
        assert execute_run(run, directory, on_event=lambda event: None) == {"a": JobState.SUCCEEDED}


def _record(spec: RunSpec, directory: RunDirectory, status: Mapping[str, Any]) -> None:
    from weft.engine.resume import job_settings
    from weft.store.run_dir import RunRecord

    for job in spec.jobs:
        directory.write_job(job.name, job_settings(job))
        (directory.path / job.name / "status.json").write_text(json.dumps(dict(status)))
    directory.write_run(
        RunRecord(base_model=spec.base_model, capacity=spec.capacity, jobs=tuple(job.name for job in spec.jobs))
    )


def test_resume_when_a_job_was_set_aside_before_it_could_start_then_it_may_be_corrected(folder: Path):
    with RunDirectory.open(folder / "out", resume=False) as directory:
        _record(run_of(folder, a=FLAT), directory, {"state": "failed", "step": 0, "can_retry": True})
        plan = plan_resume(run_of(folder, a={**FLAT, "adapter": {"r": 3}}), directory)
        assert plan == ResumePlan(frozenset(), ("a: adapter.r 2 -> 3",))
