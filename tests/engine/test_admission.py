"""Jobs without room wait, give way and go on, and every one ends to the bit as if it had never waited."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import (
    Outcome,
    assert_same_bits,
    dataset,
    finish,
    flat,
    job_spec,
    random_backbone,
    random_data,
    random_model,
    random_sample,
    small_job,
    submit,
    taken_slots,
    train,
)

from weft.adapters.lora import Adapter
from weft.backbone.backbone import Backbone
from weft.bench.regimes import Storage
from weft.bench.shapes import SHAPES
from weft.bench.step import make_backbone
from weft.cost.memory import MemoryModel
from weft.cost.rows import capacities
from weft.cost.shape import ModelShape
from weft.data.dataset import JobData
from weft.engine.admission import Places, activation_bytes
from weft.engine.engine import Engine
from weft.engine.events import Event, JobFailed, JobPreempted, JobResumed, JobStarted, JobWaiting, JobWarning, StepDone
from weft.engine.live_job import JobState
from weft.engine.optimizer import Optimizer
from weft.errors import JobError
from weft.plan.admit import QUANTUM_TOKENS, Budget
from weft.spec import AdapterSpec
from weft.store.run_dir import RunDirectory

STATE = (JobWaiting, JobStarted, JobPreempted, JobResumed)


@pytest.fixture(scope="module")
def backbone():
    return random_backbone("llama_odd")


@pytest.fixture(scope="module")
def undisturbed(backbone) -> dict[str, Outcome]:
    early = {"eval_data": 2, "eval_steps": 1, "early_stopping_patience": 9}
    jobs = [small_job("a"), small_job("b", 1, max_steps=12), small_job("c", 2), judged("judged", **early)]
    return train(backbone, jobs, capacity=48)


def judged(name: str, **settings: Any) -> Any:
    """A job with evaluations, whose best weights are state too."""
    spec, _ = small_job(name, 3, **settings)
    return spec, random_data(3, num_samples=7, num_eval=2)


def run(engine: Engine, act: Callable[[Engine, Event], None] | None = None) -> tuple[dict[str, Outcome], list[Event]]:
    """Runs to the end while checking that nobody trains without a place."""
    events: list[Event] = []

    def watch(engine: Engine, event: Event) -> None:
        events.append(event)
        for job in engine.jobs.values():
            assert (job.slot is not None) == (job.state is JobState.RUNNING), job.spec.name
        if act is not None:
            act(engine, event)

    return finish(engine, watch), events


def changes(events: list[Event]) -> list[str]:
    return [f"{event.kind} {event.job}" for event in events if isinstance(event, STATE)]


def test_run_when_everything_fits_then_nobody_waits(backbone):
    engine = Engine(backbone, capacity=48)
    submit(engine, small_job("a"), small_job("b", 1))
    _, events = run(engine)
    assert changes(events) == ["job_started a", "job_started b"]


def test_run_when_max_jobs_is_one_then_jobs_go_one_after_another_with_the_same_bits(backbone, undisturbed):
    engine = Engine(backbone, capacity=48, max_jobs=1)
    submit(engine, small_job("a"), small_job("b", 1, max_steps=12), small_job("c", 2))
    outcomes, events = run(engine)
    assert changes(events) == ["job_started a", "waiting b", "waiting c", "job_started b", "job_started c"]
    assert next(e.reason for e in events if isinstance(e, JobWaiting)).startswith("waits for a place: 1 job trains")
    for name in "abc":
        assert_same_bits(outcomes[name], undisturbed[name])
    assert not taken_slots(backbone)


def test_run_when_a_higher_priority_comes_then_a_job_gives_way_and_ends_with_the_same_bits(backbone, undisturbed):
    """Twice preempted, once in the middle of a global batch: the same adapter, the same losses, no step twice."""
    engine = Engine(backbone, capacity=30, max_jobs=1)
    early = {"eval_data": 2, "eval_steps": 1, "early_stopping_patience": 9}
    submit(engine, judged("judged", **early))

    def act(engine: Engine, event: Event) -> None:
        if isinstance(event, StepDone) and event.job == "judged" and event.step == 2:
            submit(engine, small_job("a", priority=1))
        job = engine.jobs["judged"]
        if event.kind == "microbatch" and (job.step, job.index > 0, "c" in engine.jobs) == (4, True, False):
            submit(engine, small_job("c", 2, priority=2))

    outcomes, events = run(engine, act)
    assert changes(events) == [
        "job_started judged", "preempted judged", "job_started a", "resumed judged",
        "preempted judged", "job_started c", "resumed judged",
    ]  # fmt: skip
    assert [e.reason for e in events if isinstance(e, JobPreempted)] == ["gives way to a", "gives way to c"]
    alone = train(backbone, [judged("judged", **early), small_job("a"), small_job("c", 2)], capacity=30)
    for name in ("judged", "a", "c"):
        assert_same_bits(outcomes[name], alone[name])


def test_run_when_memory_is_short_then_only_as_many_train_as_fit(backbone, undisturbed):
    probe = Engine(backbone, capacity=48)
    submit(probe, small_job("a"))
    each = probe.jobs["a"].adapter.num_parameters * 16
    engine = Engine(backbone, capacity=48, job_memory=2 * each + each // 2)
    submit(engine, small_job("a"), small_job("b", 1, max_steps=12), small_job("c", 2))
    together: set[int] = set()
    outcomes, events = run(engine, lambda _, __: together.add(len(taken_slots(backbone))))
    assert max(together) == 2
    assert "waits for memory: it needs" in next(e.reason for e in events if isinstance(e, JobWaiting))
    for name in "abc":
        assert_same_bits(outcomes[name], undisturbed[name])


def test_submit_when_a_job_can_never_fit_then_refused_with_the_arithmetic(backbone):
    engine = Engine(backbone, capacity=48, job_memory=1000)
    with pytest.raises(JobError, match=r"a: can never fit: it needs .* KiB, and of 1000 bytes only 1000 bytes are for"):
        submit(engine, small_job("a"))
    assert not engine.jobs


def test_tenants_when_one_floods_then_the_others_job_comes_in_turn(backbone):
    engine = Engine(backbone, capacity=48, max_jobs=2)
    submit(engine, *(small_job(f"x{i}", i, tenant="x") for i in range(4)), small_job("y", 9, tenant="y"))
    _, events = run(engine)
    assert changes(events)[:2] == ["job_started x0", "job_started y"]


@pytest.mark.parametrize("weight", [1.0, 2.0])
def test_tenants_when_one_comes_late_then_it_starts_level_with_those_present(backbone, weight):
    """Its lack of history is no credit, and a long history of others is no debt; level is by weight."""
    engine = Engine(backbone, capacity=48, max_jobs=1, tenant_weights={"y": weight})
    submit(engine, small_job("x", tenant="x"), small_job("z", tenant="z"))
    engine.jobs["x"].num_tokens = 50 * QUANTUM_TOKENS
    list_of_shares: list[dict[str, Any]] = []

    def act(engine: Engine, event: Event) -> None:
        if isinstance(event, StepDone) and event.job == "z" and event.step == 2:
            submit(engine, small_job("y", 1, tenant="y"))

    places: Places = engine._places
    decide = places._shares

    def spy(*arguments: Any) -> Any:
        list_of_shares.append(decide(*arguments))
        return list_of_shares[-1]

    places._shares = spy  # type: ignore[method-assign]
    run(engine, act)
    since = [shares for shares in list_of_shares if "y" in shares]
    level = since[0]["y"].served_tokens
    assert level == weight * min(since[0]["x"].served_tokens, since[0]["z"].served_tokens) > 0
    assert len(since) > 1 and all(shares["y"].served_tokens >= level for shares in since), "it keeps its start"


def test_tenants_when_one_weighs_more_then_it_has_more_places(backbone):
    """Three places, and a tenant of weight 2 beside one of weight 1: two of them are its own."""
    engine = Engine(backbone, capacity=48, max_jobs=3, tenant_weights={"y": 2.0})
    jobs = [small_job(f"{tenant}{i}", i, tenant=tenant) for tenant in "xy" for i in range(3)]
    submit(engine, *jobs)
    _, events = run(engine)
    assert changes(events)[:3] == ["job_started x0", "job_started y0", "job_started y1"]


def test_pause_when_a_job_waits_then_it_holds_back_and_resume_queues_it_again(backbone, undisturbed):
    engine = Engine(backbone, capacity=48, max_jobs=1)
    submit(engine, small_job("b", 1, max_steps=12), small_job("a"), small_job("c", 2))
    engine.pause("a")

    def act(engine: Engine, event: Event) -> None:
        if event.kind == "succeeded" and event.job == "c":
            assert engine.jobs["a"].state is JobState.PAUSED
            engine.resume("a")

    outcomes, events = run(engine, act)
    assert [line for line in changes(events) if "started" in line] == [f"job_started {name}" for name in "bca"]
    assert_same_bits(outcomes["a"], undisturbed["a"])


def test_pause_when_a_job_trains_then_its_place_is_free_for_who_waits(backbone, undisturbed):
    engine = Engine(backbone, capacity=48, max_jobs=1)
    submit(engine, small_job("a"), small_job("b", 1, max_steps=12))

    def act(engine: Engine, event: Event) -> None:
        if isinstance(event, StepDone) and (event.job, event.step) == ("a", 3):
            engine.pause("a")
        if isinstance(event, StepDone) and (event.job, event.step) == ("b", 4):
            engine.resume("a")

    outcomes, events = run(engine, act)
    # Who came first goes first, also after a pause.
    assert changes(events) == ["job_started a", "waiting b", "job_started b", "preempted b", "resumed a", "resumed b"]
    for name in "ab":
        assert_same_bits(outcomes[name], undisturbed[name])


def test_stop_when_a_job_is_preempted_then_it_is_saved_and_a_resumed_run_ends_with_the_same_bits(
    backbone, undisturbed, tmp_path: Path
):
    path = tmp_path / "run"

    def begin() -> tuple[Engine, RunDirectory]:
        engine = Engine(backbone, capacity=48, max_jobs=1)
        directory = RunDirectory.open(path, resume=(path / "run.json").exists())
        directory.write_run({})
        engine.keep_in(directory)
        submit(engine, small_job("b", 1, max_steps=12))
        return engine, directory

    engine, directory = begin()

    def act(engine: Engine, event: Event) -> None:
        if isinstance(event, StepDone) and (event.job, event.step) == ("b", 5):
            submit(engine, small_job("a", priority=1))
        if isinstance(event, StepDone) and (event.job, event.step) == ("a", 2):
            status = json.loads((path / "b" / "status.json").read_text())
            assert (status["state"], status["step"], status["reason"]) == ("queued", 5, "gives way to a")
            engine.stop()

    with directory:
        first, _ = run(engine, act)
    assert {name: outcome.state for name, outcome in first.items()} == {"a": "paused", "b": "paused"}
    engine, directory = begin()
    with directory:
        second, events = run(engine)
    assert events[0] == JobStarted("b", 5, 12)
    second["b"].goes_on_from(first["b"])
    assert_same_bits(second["b"], undisturbed["b"])


def test_stop_when_a_job_has_not_started_then_it_stays_queued_and_its_checkpoint_is_untouched(backbone, tmp_path: Path):
    with RunDirectory.open(tmp_path / "run", resume=False) as directory:
        engine = Engine(backbone, capacity=48, max_jobs=1)
        engine.keep_in(directory)
        submit(engine, small_job("a"), small_job("b", 1))
        run(engine, lambda engine, event: engine.stop() if isinstance(event, StepDone) else None)
    assert {name: str(job.state) for name, job in engine.jobs.items()} == {"a": "paused", "b": "queued"}
    assert not list((tmp_path / "run").glob("b/checkpoints/*"))


def test_start_when_the_first_in_line_is_found_complete_then_the_next_gets_its_place(backbone, tmp_path: Path):
    """It ends without a microbatch, so nothing but the line itself keeps the engine going."""
    with RunDirectory.open(tmp_path / "run", resume=False) as directory:
        directory.write_run({})
        engine = Engine(backbone, capacity=48)
        engine.keep_in(directory)
        submit(engine, small_job("a"))
        engine.run()
    with RunDirectory.open(tmp_path / "run", resume=True) as directory:
        engine = Engine(backbone, capacity=48, max_jobs=1)
        engine.keep_in(directory)
        submit(engine, small_job("a"), small_job("b", 1))
        outcomes, _ = run(engine)
    assert {name: outcome.state for name, outcome in outcomes.items()} == {"a": "succeeded", "b": "succeeded"}


def test_pause_when_a_job_waits_for_its_start_then_its_checkpoint_stays_the_newest(
    backbone, undisturbed, tmp_path: Path
):
    """What is in memory before the first start is a fresh adapter, not the job's state."""
    with RunDirectory.open(tmp_path / "run", resume=False) as directory:
        directory.write_run({})
        engine = Engine(backbone, capacity=48)
        engine.keep_in(directory)
        submit(engine, small_job("a"))
        first, _ = run(engine, lambda e, event: e.stop() if isinstance(event, StepDone) and event.step == 3 else None)
    with RunDirectory.open(tmp_path / "run", resume=True) as directory:
        engine = Engine(backbone, capacity=48)
        engine.keep_in(directory)
        submit(engine, small_job("a"))
        engine.pause("a")
        run(engine)
        assert [path.name for path in (tmp_path / "run" / "a" / "checkpoints").iterdir()] == ["step-00000003"]
        engine.resume("a")
        second, events = run(engine)
    assert events[0] == JobStarted("a", 3, 6)
    second["a"].goes_on_from(first["a"])
    assert_same_bits(second["a"], undisturbed["a"])


class FullGpu(Backbone):
    """A backbone with memory for so many adapters, whatever admission believes."""

    def __init__(self, room: int) -> None:
        super().__init__(random_model("llama_odd"), SimpleNamespace(eos_token_id=None), "full")
        self.room = room
        self.failures = 0

    def attach(self, adapter: Adapter) -> int:
        if len(taken_slots(self)) >= self.room:
            self.failures += 1
            raise torch.OutOfMemoryError("no room")
        return super().attach(adapter)


def test_start_when_memory_turns_out_short_then_the_job_waits_for_another_to_end(undisturbed):
    backbone = FullGpu(1)
    engine = Engine(backbone, capacity=48)
    submit(engine, small_job("b", 1, max_steps=12), small_job("a"), small_job("c", 2))
    outcomes, events = run(engine)
    # Both are tried once; that there is room for one only is remembered over the many decisions that follow.
    assert backbone.failures == 2
    expected = ["job_started b", "waiting a", "waiting c", "job_started a", "job_started c"]
    assert changes(events) == expected
    for name in "abc":
        assert_same_bits(outcomes[name], undisturbed[name])


def test_start_when_there_is_no_memory_even_alone_then_the_job_fails_and_says_so():
    engine = Engine(FullGpu(0), capacity=48)
    submit(engine, small_job("a"))
    outcomes, events = run(engine)
    assert outcomes["a"].state == "failed"
    assert isinstance(events[-1], JobFailed) and "no memory for its adapter, even alone" in events[-1].reason


class FakeGpu:
    """The account of a GPU of 80 GB that holds 16 GB of weights, and the places on it."""

    weights, total = 16 * 10**9, 80 * 10**9

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *jobs: Any) -> None:
        self.peak = 0
        backbone = SimpleNamespace(device=torch.device("cuda"), fused=object(), dtype=torch.bfloat16)
        named: Any = {job.spec.name: job for job in jobs}
        self.places = Places(backbone, named, max_jobs=None, job_memory=None, weights={})
        self.allocated = self.weights + sum(job.allocated for job in jobs)
        given = {
            "max_memory_allocated": lambda _: self.peak,
            "memory_allocated": lambda _: self.allocated,
            "memory_reserved": lambda _: self.allocated,
            "mem_get_info": lambda _: (self.total - self.allocated, self.total),
            "get_per_process_memory_fraction": lambda _: 1.0,
            "reset_peak_memory_stats": self.reset,
        }
        for name, stand_in in given.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        # A microbatch of 8,192 tokens takes 50 GB where ranks go up to 16.
        monkeypatch.setattr(
            "weft.engine.admission.activation_bytes",
            lambda _, capacity, rank: capacity * rank * 50 * 10**9 // (8192 * 16),
        )

    def reset(self, _: torch.device) -> None:
        self.peak = self.allocated

    def run(self, activations: int) -> None:
        self.peak = max(self.peak, self.allocated + activations)

    @property
    def besides(self) -> int:
        """What is not for jobs."""
        return self.places._budget(8192).fixed_bytes


def placed(name: str, slot: int | None, patience: int | None = None, num_parameters: int = 10**8) -> Any:
    """A job in figures: 18 bytes per parameter, and 4 more once there is a best to keep."""
    spec = SimpleNamespace(
        name=name, early_stopping_patience=patience, adapter=AdapterSpec(r=8, rank_pattern={"q_proj": 16})
    )
    adapter = SimpleNamespace(num_parameters=num_parameters)
    return SimpleNamespace(
        spec=spec, adapter=adapter, slot=slot, best_params=None, allocated=18 * num_parameters if slot else 0
    )


def test_memory_when_it_ran_out_then_the_attempt_counts_neither_as_measured_nor_as_proven(monkeypatch):
    """Microbatches of half the size leave room for another job, as soon as they are made smaller."""
    gpu = FakeGpu(monkeypatch, placed("a", 1))
    places, late = gpu.places, placed("late", None, num_parameters=15 * 10**8)
    with places.watched():
        gpu.run(50 * 10**9)
    with places.watched():
        gpu.run(78 * 10**9 - gpu.allocated)
        places.ran_out()
    assert places._proven_bytes == 0 and places._measured_bytes is None
    with pytest.raises(JobError, match="can never fit"):
        places.check(late, 8192)
    places.check(late, 4096)
    with places.watched():
        gpu.run(25 * 10**9)
    assert gpu.besides == gpu.weights + 25 * 10**9
    assert places._proven_bytes == places.bytes_of(placed("a", 1)), "the next stretch is noted again"
    places.check(late, 4096)


@pytest.mark.parametrize("patience", [None, 3])
def test_memory_when_measured_then_all_but_what_the_jobs_hold_is_not_for_jobs(monkeypatch, patience):
    """A best that there is not yet is no part of the peak."""
    jobs = [placed(f"job{i}", i + 1, patience) for i in range(8)]
    gpu = FakeGpu(monkeypatch, *jobs)
    assert gpu.besides == gpu.weights + 50 * 10**9, "estimated"
    with gpu.places.watched():
        gpu.run(40 * 10**9)
        for job in jobs:
            job.best_params = None if patience is None else ()
    assert gpu.besides == gpu.weights + 40 * 10**9


def test_stretches_when_they_run_then_are_watched_also_where_memory_runs_out(undisturbed, monkeypatch):
    noted: list[str] = []

    class Noting(Places):
        @contextmanager
        def watched(self) -> Iterator[None]:
            noted.append("begin")
            with super().watched():
                yield
            noted.append("end")

        def ran_out(self) -> None:
            noted.append("ran out")
            super().ran_out()

    class Once(Backbone):
        def launch(self, *given: Any) -> Any:
            if "ran out" not in noted:
                raise torch.OutOfMemoryError("no room")
            return super().launch(*given)

    monkeypatch.setattr("weft.engine.engine.Places", Noting)
    engine = Engine(Once(random_model("llama_odd"), SimpleNamespace(eos_token_id=None), "once"), capacity=96)
    submit(engine, small_job("a"))
    outcomes, _ = run(engine)
    assert noted[:4] == ["begin", "ran out", "end", "begin"] and noted.count("ran out") == 1
    assert_same_bits(outcomes["a"], undisturbed["a"])


def test_start_when_a_job_gets_its_place_then_it_holds_all_that_admission_counts(backbone):
    """Moments too, before its first step; so what a first microbatch takes beside it can be told."""
    engine = Engine(backbone, capacity=48)
    submit(engine, judged("judged", eval_data=2, eval_steps=1, early_stopping_patience=9))
    job, seen = engine.jobs["judged"], []

    def act(engine: Engine, event: Event) -> None:
        if isinstance(event, JobStarted | StepDone) and job.slot is not None:
            adapter = job.adapter
            held = [adapter.params_a, adapter.params_b, adapter.grad_a, adapter.grad_b, *(job.best_params or ())]
            held += [state[name] for state in job.optimizer.states for name in ("exp_avg", "exp_avg_sq")]
            seen.append(event.kind)
            assert sum(tensor.nbytes for tensor in held) == engine._places._allocated_bytes()

    run(engine, act)
    assert seen[0] == "job_started" and "step" in seen


def test_move_when_memory_runs_out_on_the_way_then_the_job_is_whole_on_the_cpu(backbone, monkeypatch):
    engine = Engine(backbone, capacity=48)
    submit(engine, small_job("a"))
    engine.run()
    job = engine.jobs["a"]
    before = job.tensors()
    restore, calls = Optimizer.restore, []

    def fail_once(optimizer: Optimizer, tensors: dict[str, torch.Tensor]) -> None:
        calls.append(optimizer)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("no room")
        restore(optimizer, tensors)

    monkeypatch.setattr(Optimizer, "restore", fail_once)
    with pytest.raises(torch.OutOfMemoryError):
        job.move_to(backbone.device)
    after = job.tensors()
    assert before.keys() == after.keys() and all(before[name].equal(after[name]) for name in before)


def test_move_when_a_job_is_taken_off_then_its_tensors_are_its_own_and_unchanged(backbone):
    engine = Engine(backbone, capacity=48)
    submit(engine, small_job("a"))
    for event in engine.events():
        if isinstance(event, StepDone) and event.step == 3:
            break
    job = engine.jobs["a"]
    before, slotted = job.tensors(), job.adapter.params_a
    engine._places.take(job)
    assert job.slot is None and job.adapter.params_a is not slotted
    after = job.tensors()
    assert before.keys() == after.keys() and all(before[name].equal(after[name]) for name in before)
    slotted.zero_()
    assert all(x.equal(y) for x, y in zip(flat(job.adapter.tensors()), flat(engine.adapter_of("a")), strict=True))
    assert job.adapter.params_a.abs().sum() > 0 and not job.adapter.grad_a.any()


class PerToken(Places):
    """Places where every token of a microbatch takes its bytes from the jobs."""

    token_bytes, total_bytes = 0, 0

    def _budget(self, capacity: int) -> Budget:
        return Budget(self.total_bytes, capacity * self.token_bytes)


@pytest.fixture
def per_token(backbone, monkeypatch) -> type[PerToken]:
    """A device where a job of `small_job` fits beside microbatches of up to 20 tokens."""
    monkeypatch.setattr("weft.engine.engine.Places", PerToken)
    engine = Engine(backbone, capacity=48)
    PerToken.token_bytes, PerToken.total_bytes = 10**6, 10**9
    submit(engine, small_job("size"))
    job_bytes = engine._places.bytes_of(engine.jobs["size"])
    PerToken.total_bytes = 20 * 10**6 + job_bytes
    return PerToken


def test_run_when_microbatches_leave_no_memory_then_they_are_made_smaller_and_it_is_said(backbone, per_token):
    """The capacity that was asked for is halved until a job fits; nobody is refused for it."""
    engine = Engine(backbone, capacity=48)
    submit(engine, small_job("a"))
    outcomes, events = run(engine)
    assert outcomes["a"].state == "succeeded"
    assert engine.limits.capacity == max(12, engine.jobs["a"].longest)
    told = [event.message for event in events if isinstance(event, JobWarning)]
    assert told == [f"microbatches of 48 tokens would leave no memory for a job on this GPU; they hold at most "
                    f"{engine.limits.capacity} instead (capacity: {engine.limits.capacity})."]  # fmt: skip


def test_submit_when_not_even_the_smallest_microbatch_leaves_memory_then_refused(backbone, per_token):
    per_token.total_bytes = 10**6
    with pytest.raises(JobError, match="can never fit"):
        submit(Engine(backbone, capacity=48), small_job("a"))


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("recompute", ["none", "mlp"])
def test_activation_bytes_when_the_step_is_fused_then_are_the_memory_models(recompute, offload):
    """Whole tiles of rows, with what the step really keeps on the GPU."""
    shape, storage = replace(SHAPES["tiny"], layers=3), Storage(recompute=recompute, offload=offload)
    made = make_backbone(shape, storage, torch.float32, torch.device("cpu"), "fused")
    model = MemoryModel(ModelShape.from_config(shape.config().to_dict()), "none", recompute, 4)
    rows = 2 * made.row_tile(200)
    kept = model.kept_bytes(rows, 32) - (model.offloaded_bytes(rows) if offload else 0)
    assert kept > 0 and model.offloaded_bytes(rows) > 0
    assert activation_bytes(made, 200, 32) == kept + model.workspace_bytes(rows, 32) + model.loss_bytes()


def test_activation_bytes_when_estimated_then_count_every_linear_once(backbone):
    # llama_odd, per layer: q, k, v and o 36 x 36, gate and up 36 x 50, down 50 x 36; two layers, four bytes.
    assert activation_bytes(backbone, 10) == 10 * 4 * 2 * (4 * 72 + 3 * 86)


@pytest.mark.parametrize(
    ("capacity", "max_jobs", "found"), [("auto", None, 4096), ("auto", 1, 8192), (8192, None, 8192)]
)
def test_run_when_large_microbatches_would_make_jobs_wait_then_only_a_number_keeps_them(
    backbone, per_token, monkeypatch, capacity, max_jobs, found
):
    """Two jobs fit beside microbatches of 5,000 tokens, one beside 8,192, which it cannot fill: `auto` gives way."""
    monkeypatch.setattr("weft.engine.engine.capacities", lambda asked, _, longest: capacities(asked, "cuda", longest))
    engine = Engine(backbone, capacity=capacity, max_jobs=max_jobs)
    submit(engine, small_job("a"), small_job("b", 1))
    each = engine._places.bytes_of(engine.jobs["a"])
    per_token.token_bytes = each // 4000
    per_token.total_bytes = 2 * each + 5000 * per_token.token_bytes
    _, events = run(engine)
    assert engine.limits.capacity == found
    told = [event.message for event in events if isinstance(event, JobWarning)]
    says = "microbatches of 8192 tokens would leave no memory for enough jobs to fill them on this GPU; they hold"
    assert [message[: len(says)] for message in told] == ([says] if found == 4096 else [])


@pytest.mark.parametrize(("num_fitting", "capacity", "found"), [(1, 20, True), (1, 60, False), (2, 60, True)])
def test_microbatches_when_not_all_jobs_fit_beside_them_then_those_that_do_can_fill_them_or_not(
    backbone, per_token, num_fitting, capacity, found
):
    """Global batches of 30 tokens: one job fills a microbatch of 20 but not one of 60."""
    engine = Engine(backbone, capacity=64)
    data = JobData(dataset([random_sample(np.random.default_rng(n), 10) for n in range(6)]), None)
    for name in ("a", "b", "c"):
        engine.submit(job_spec(name, global_batch_size=3), data)
    each = engine._places.bytes_of(engine.jobs["a"])
    per_token.token_bytes, per_token.total_bytes = 1, num_fitting * each + capacity
    assert engine._places.can_fill(capacity) is found
    per_token.total_bytes = None
    assert engine._places.can_fill(capacity), "there is no limit"


def test_capacity_when_it_is_auto_then_holds_the_longest_sample_of_the_run(backbone):
    assert Engine(backbone).limits.capacity == 2048
    assert Engine(backbone, longest=3000).limits.capacity == 4096
    assert Engine(backbone, capacity=100, longest=50).limits.capacity == 100
