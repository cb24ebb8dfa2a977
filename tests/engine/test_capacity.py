"""A GPU that runs out of memory costs a microbatch, not the run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import (
    Outcome,
    dataset,
    finish,
    job_spec,
    random_data,
    random_model,
    random_sample,
    small_job,
    submit,
    taken_slots,
)

from weft.data.dataset import JobData
from weft.engine.engine import Engine
from weft.engine.events import Event, JobFailed, JobWarning, MicrobatchDone, StepDone
from weft.engine.execute.memory import USUAL_JOBS, load_within, replica_memory, start_capacity
from weft.engine.execute.protocol import ReplicaFaultError
from weft.engine.preview import preview
from weft.errors import ConfigError
from weft.job_state import JobState
from weft.model.backbone import Backbone
from weft.model.load import load_backbone, load_skeleton
from weft.model.packed import PackedBatch
from weft.model.path import PendingScores
from weft.model.resolve import resolve
from weft.spec import BackboneSpec
from weft.store.run_dir import RunDirectory, RunRecord


class SmallGpu(Backbone):
    """A backbone that runs out of memory above some number of tokens, with half of the gradients written."""

    error: Exception = torch.OutOfMemoryError("no room")

    def __init__(self, room: int, eval_room: int = 10**6) -> None:
        super().__init__(random_model("llama_odd"), SimpleNamespace(eos_token_id=None), "small")
        self.room, self.eval_room = room, eval_room
        self.failures = 0

    def launch(self, batch: PackedBatch, row_tile: int | None) -> Any:
        running = super().launch(batch, row_tile)
        self._check(batch, self.room)
        return running

    def look(self, batch: PackedBatch, row_tile: int | None) -> PendingScores:
        self._check(batch, self.eval_room)
        return super().look(batch, row_tile)

    def _check(self, batch: PackedBatch, room: int) -> None:
        if batch.num_tokens > room:
            self.failures += 1
            raise self.error


def jobs() -> list[Any]:
    return [small_job("a"), small_job("b", 1), small_job("c", 2)]


def run(backbone: Backbone, given: list[Any], capacity: int) -> tuple[dict[str, Outcome], list[Event], Engine]:
    engine = Engine(backbone, capacity=capacity)
    submit(engine, *given)
    events: list[Event] = []
    outcomes = finish(engine, lambda _, event: events.append(event))
    return outcomes, events, engine


def with_sample_of(length: int) -> JobData:
    rng = np.random.default_rng(length)
    return JobData(dataset([random_sample(rng, n) for n in (5, length, 7)]), None)


def assert_same_weights(mine: Outcome, other: Outcome) -> None:
    for path, pair in mine.adapter.items():
        for x, y in zip(pair, other.adapter[path], strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("wrong", [{"capacity": -3}, {"capacity": 1}, {"max_jobs": 0}])
def test_engine_when_a_limit_holds_nothing_then_refuses_before_the_backbone_is_looked_for(wrong: dict[str, int]):
    ((name, value),) = wrong.items()
    with pytest.raises(ConfigError, match=f"Engine {name}: got {value}"):
        Engine("no-such-model", **wrong)


def test_run_when_memory_runs_out_then_goes_on_with_half_the_capacity_and_reports_it():
    """Every job ends where it would have ended, and the user learns what to set."""
    expected, _, _ = run(SmallGpu(10**6), jobs(), 100)
    backbone = SmallGpu(60)
    outcomes, events, engine = run(backbone, jobs(), 100)
    assert backbone.failures == 1 and engine.limits.capacity == 50
    warnings = [event.message for event in events if isinstance(event, JobWarning)]
    assert len(warnings) == 1
    assert "ran out of memory at a capacity of 100 tokens" in warnings[0] and "capacity: 50" in warnings[0]
    assert all(event.tokens <= 50 for event in events if isinstance(event, MicrobatchDone))
    for name in "abc":
        assert outcomes[name].state == "succeeded"
        assert outcomes[name].losses == expected[name].losses
        assert_same_weights(outcomes[name], expected[name])
    assert not taken_slots(backbone)


def test_run_when_memory_runs_out_in_the_middle_of_a_global_batch_then_starts_it_again():
    """What has run of it before is run again, with nothing counted twice."""
    expected, _, _ = run(SmallGpu(10**6), [small_job("a", global_batch_size=7)], 40)
    backbone = SmallGpu(10**6)
    engine = Engine(backbone, capacity=40)
    submit(engine, small_job("a", global_batch_size=7))
    seen: list[int] = []
    for event in engine.events():
        if isinstance(event, MicrobatchDone):
            seen.append(event.tokens)
            backbone.room = 30 if len(seen) >= 2 else 10**6
        if isinstance(event, StepDone) and event.step == 1:
            backbone.room = 10**6
    assert backbone.failures >= 1 and engine.jobs["a"].state is JobState.SUCCEEDED
    weights = Outcome(engine.executor.adapter_of("a"), "succeeded", None)
    assert_same_weights(weights, expected["a"])


def test_run_when_the_longest_sample_does_not_fit_then_its_job_fails_and_the_others_go_on():
    long = (job_spec("long", max_length=24, global_batch_size=1), with_sample_of(24))
    backbone = SmallGpu(20)
    outcomes, events, engine = run(backbone, [small_job("a"), long, small_job("b", 1)], 48)
    assert {name: outcome.state for name, outcome in outcomes.items()} == {
        "a": "succeeded", "long": "failed", "b": "succeeded",
    }  # fmt: skip
    (failed,) = [event for event in events if isinstance(event, JobFailed)]
    assert failed.reason.text.startswith("too long for this GPU: a microbatch of 24 tokens")
    assert "lower max_length" in failed.reason.text and engine.jobs["long"].reason == failed.reason
    assert engine.limits.capacity < 24
    expected, _, _ = run(SmallGpu(10**6), [small_job("a"), small_job("b", 1)], 48)
    for name in "ab":
        assert_same_weights(outcomes[name], expected[name])
    assert not taken_slots(backbone)


def test_run_when_nothing_fits_then_all_jobs_fail_and_the_run_ends():
    outcomes, _, _ = run(SmallGpu(2), jobs(), 100)
    assert {outcome.state for outcome in outcomes.values()} == {"failed"}


def test_capacity_when_a_paused_job_has_a_longer_sample_then_stays_large_enough_for_it():
    backbone = SmallGpu(40)
    engine = Engine(backbone, capacity=96)
    submit(engine, small_job("a"), (job_spec("long", max_length=36, max_steps=30), with_sample_of(36)))
    backbone.room = 10**6
    for event in engine.events():
        if isinstance(event, StepDone) and event.job == "long" and event.step == 2:
            engine.pause("long")
        if event.kind == "paused":
            backbone.room = 40
            submit(engine, small_job("b", 1), small_job("c", 2), small_job("d", 3))
    assert engine.limits.capacity == 36 and backbone.failures == 2
    engine.resume("long")
    assert engine.run()["long"].state is JobState.SUCCEEDED
    with pytest.raises(ConfigError, match=r"max_length 64 is above the capacity \(36\)"):
        engine.submit(job_spec("late", max_length=64), random_data(4))


def test_evaluation_when_memory_runs_out_then_is_done_again_with_less():
    spec = job_spec("a", eval_data=8, eval_steps=3)
    data = random_data(0, num_samples=7, num_eval=8)
    expected, _, _ = run(SmallGpu(10**6), [(spec, data)], 100)
    backbone = SmallGpu(10**6, eval_room=60)
    outcomes, _, engine = run(backbone, [(spec, data)], 100)
    assert backbone.failures == 1 and engine.limits.capacity == 50
    assert outcomes["a"].state == "succeeded"
    assert outcomes["a"].eval_losses == pytest.approx(expected["a"].eval_losses, rel=1e-6)
    assert len(outcomes["a"].eval_losses) == 2


@pytest.mark.parametrize("settings", [{"room": 60}, {"room": 10**6, "eval_room": 60}], ids=["training", "evaluation"])
@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_run_when_not_torchs_allocator_runs_out_then_goes_on_with_half_the_capacity_too(error, settings):
    backbone = SmallGpu(**settings)
    backbone.error = error
    given = [(job_spec("a", eval_data=8, eval_steps=3), random_data(0, num_samples=7, num_eval=8)), small_job("b", 1)]
    outcomes, _, engine = run(backbone, given, 100)
    assert backbone.failures == 1 and engine.limits.capacity == 50
    assert [outcome.state for outcome in outcomes.values()] == ["succeeded", "succeeded"]


def test_run_when_something_else_fails_then_the_run_ends_with_it():
    backbone = SmallGpu(60)
    backbone.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(ReplicaFaultError, match="illegal memory access"):
        run(backbone, jobs(), 100)


def test_evaluation_when_memory_runs_out_for_the_best_weights_then_they_are_kept_all_the_same(monkeypatch):
    """The adapter is that of the best evaluation, which is reported once and not run again."""
    data = random_data(0, num_samples=7).train
    spec = job_spec("a", eval_data=8, eval_steps=1, max_steps=3, early_stopping_patience=2, learning_rate=1e-2)
    expected, _, _ = run(SmallGpu(10**6), [(spec, JobData(data, data))], 100)
    assert expected["a"].eval_losses == sorted(expected["a"].eval_losses, reverse=True), "the last is the best"
    backbone, looks, failed = SmallGpu(10**6), [], []
    engine = Engine(backbone, capacity=100)
    submit(engine, (spec, JobData(data, data)))
    job, clone, look = engine.jobs["a"], torch.Tensor.clone, backbone.look

    def clone_once_there_is_room(tensor: torch.Tensor) -> torch.Tensor:
        if tensor is engine.executor.jobs["a"].weights.adapter.groups["b"].params and job.step == 3 and not failed:
            failed.append(job.step)
            raise torch.OutOfMemoryError("no room")
        return clone(tensor)

    monkeypatch.setattr(torch.Tensor, "clone", clone_once_there_is_room)
    monkeypatch.setattr(backbone, "look", lambda *given: looks.append(job.step) or look(*given))
    outcomes = finish(engine)
    assert failed == [3] and looks == [1, 2, 3]
    assert outcomes["a"].eval_losses == expected["a"].eval_losses
    assert_same_weights(outcomes["a"], expected["a"])


def test_resume_when_memory_had_run_out_then_goes_on_with_the_capacity_it_was_left_with(tmp_path: Path):
    """It would run out again; and with the same capacity the bits stay those of the run left alone."""
    given = [small_job("a", save_steps=1), small_job("b", 1, save_steps=1)]

    def begin(path: Path, room: int) -> tuple[Engine, RunDirectory]:
        engine = Engine(SmallGpu(room), capacity=100)
        directory = RunDirectory.open(path, resume=(path / "run.json").exists())
        directory.write_run(RunRecord())
        engine.keep_in(directory)
        submit(engine, *given)
        return engine, directory

    engine, directory = begin(tmp_path / "run", 60)
    with directory:
        for event in engine.events():
            if isinstance(event, StepDone) and event.step == 3:
                engine.stop()
    checkpoint = max((tmp_path / "run" / "a" / "checkpoints").rglob("*.json"))
    assert '"capacity": 50' in json.dumps(json.loads(checkpoint.read_text()))
    engine, directory = begin(tmp_path / "run", 10**6)
    with directory:
        events = list(engine.events())
    assert engine.limits.capacity == 50
    messages = [event.message for event in events if isinstance(event, JobWarning)]
    assert len(messages) == 1 and "goes on with a capacity of 50" in messages[0]
    expected, _, _ = run(SmallGpu(60), given, 100)
    for name in "ab":
        assert_same_weights(Outcome(engine.executor.adapter_of(name), "", None), expected[name])


def test_submit_when_a_job_is_new_then_nothing_of_it_is_on_the_gpu_before_it_has_a_seat(monkeypatch):
    """So no memory can run out while a job is made ready; `Executor.seat` is where it may."""
    engine, made = Engine(SmallGpu(10**6), capacity=48), []
    new_adapter = engine.executor.backbone.new_adapter

    def noted(spec: Any, seed: int, device: torch.device, *rest: Any) -> Any:
        made.append(device)
        return new_adapter(spec, seed, device, *rest)

    monkeypatch.setattr(engine.executor.backbone, "new_adapter", noted)
    submit(engine, small_job("a"))
    assert made == [torch.device("cpu")]
    assert {tensor.device.type for tensor in engine.executor.jobs["a"].weights.tensors().values()} == {"cpu"}


def test_preview_when_memory_runs_out_then_plans_with_smaller_microbatches_as_training_would():
    backbone = SmallGpu(60)
    engine = Engine(backbone, capacity=100)
    submit(engine, *jobs())
    plan = preview(engine)
    assert backbone.failures == 1 and plan.capacity == 50 and 0.5 < plan.fill <= 1
    other = SmallGpu(60)
    other.error = RuntimeError("Triton Error [CUDA]: out of memory")
    engine = Engine(other, capacity=100)
    submit(engine, *jobs())
    assert preview(engine).capacity == 50
    assert not taken_slots(backbone)


def test_preview_when_not_even_the_longest_sample_fits_then_reports_what_to_lower():
    backbone = SmallGpu(20)
    engine = Engine(backbone, capacity=48)
    submit(engine, (job_spec("long", max_length=24, global_batch_size=1), with_sample_of(24)))
    with pytest.raises(
        ConfigError, match="a microbatch of 24 tokens, as the longest sample needs, does not fit the GPU"
    ):
        preview(engine)
    assert not taken_slots(backbone)


def test_load_within_when_there_is_no_gpu_then_the_limit_is_of_the_process():
    backbone, notes = load_within(BackboneSpec("tiny", device="cpu"), "1GB", USUAL_JOBS)
    memory = replica_memory(backbone)
    assert backbone.name == "tiny" and notes == ()
    assert memory is not None and memory.usable_bytes == pytest.approx(10**9, rel=1e-6)
    assert load_within(BackboneSpec("tiny", device="cpu"), None, USUAL_JOBS)[1] == ()


@pytest.mark.parametrize(
    ("tokens", "spare", "chosen"),
    [(8192, 8, 8192), (8192, 7.9, 4096), (4096, 4, 4096), (4096, 3.9, 2048), (1, 0, 2048)],
)
def test_start_capacity_when_the_gpu_is_small_then_leaves_room_for_the_jobs_that_fill_it(
    monkeypatch, tokens, spare, chosen
):
    """`spare`: how many usual jobs the GPU has memory for beside a microbatch of `tokens`."""
    backbone = load_skeleton(resolve(BackboneSpec("tiny")))
    width = sum(linear.in_features + linear.out_features for linear in backbone.linears.values())
    job_bytes, token_bytes = 16 * width * 16, backbone.reference.activation_bytes(1, 16)
    total = int((tokens * token_bytes + spare * job_bytes) * 1.05) + 8
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=2 * total))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 0.5)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 0)
    assert start_capacity(backbone, "auto") == chosen
    assert start_capacity(backbone, 8192) == 8192
    assert start_capacity(load_backbone(BackboneSpec("tiny", device="cpu")), "auto") == 2048
