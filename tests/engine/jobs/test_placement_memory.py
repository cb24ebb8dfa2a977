"""What a device holds besides its jobs, and how large that lets microbatches be."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import assert_same_bits, dataset, finish, job_spec, random_backbone, random_sample, small_job, submit

from weft.data.dataset import JobData
from weft.engine.engine import Engine
from weft.engine.events import Event, JobWaiting, JobWarning, MicrobatchDone
from weft.engine.execute import memory as memory_of
from weft.engine.execute.local import LocalExecutor
from weft.engine.execute.memory import DeviceAccount, weight_bytes
from weft.engine.jobs.room import Placement
from weft.engine.timeline import TimelineRecorder
from weft.errors import JobError
from weft.methods.registry import cost_ranks
from weft.model.load import Storage, make_backbone
from weft.plan.admit import MARGIN, Budget
from weft.plan.cost.memory import MemoryModel
from weft.plan.cost.memory_fit import ENOUGH
from weft.plan.cost.shape import SHAPES, ModelShape, capacities
from weft.spec import AdapterSpec


@pytest.fixture(scope="module")
def backbone():
    return random_backbone("llama_odd")


def warned(engine: Engine) -> list[str]:
    """Runs to the end; the warnings that users got."""
    warnings: list[str] = []
    outcomes = finish(
        engine, lambda _, event: warnings.append(event.message) if isinstance(event, JobWarning) else None
    )
    assert {outcome.state for outcome in outcomes.values()} == {"succeeded"}
    return warnings


class FakeGpu:
    """The account of a GPU of 80 GB that holds 16 GB of weights, and the placement on it."""

    weights, total = 16 * 10**9, 80 * 10**9

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *jobs: Any) -> None:
        self.peak = 0
        path = SimpleNamespace(copy_bytes=2, activation_bytes=self.activation_bytes)
        executor = LocalExecutor.__new__(LocalExecutor)
        executor.backbone = SimpleNamespace(  # type: ignore[assignment]
            device=torch.device("cuda"), path=path, activation_bytes=self.activations
        )
        executor.account = self.account = DeviceAccount(executor.backbone)
        facts = SimpleNamespace(weight_bytes=weight_bytes(executor.backbone), replica_sizes=(1,), tensor=(1,))
        executor.facts = facts  # type: ignore[assignment]
        named: Any = {job.spec.name: job for job in jobs}
        self.placement = Placement(
            executor, named, max_jobs=None, job_memory=None, weights={}, timeline=TimelineRecorder()
        )
        self.placement._seated = {job.name for job in jobs if job.allocated}
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

    @staticmethod
    def activation_bytes(capacity: int, rank: int) -> int:
        """A microbatch of 8,192 tokens takes 50 GB where ranks go up to 16."""
        return capacity * rank * 50 * 10**9 // (8192 * 16)

    def activations(self, capacity: int, adapters: list[AdapterSpec]) -> int:
        return self.activation_bytes(capacity, max((cost_ranks(spec).widest for spec in adapters), default=1))

    def reset(self, _: torch.device) -> None:
        self.peak = self.allocated

    def run(self, activations: int, tokens: int = 8192) -> None:
        self.peak = max(self.peak, self.allocated + activations)
        self.account.meter.hold(0, tokens)
        self.account.meter.release(0)

    @property
    def besides(self) -> int:
        """What is not for jobs."""
        return self.placement._budget(8192).fixed_bytes


def fake_job(name: str, slot: int | None, patience: int | None = None, num_parameters: int = 10**8) -> Any:
    """A job in figures: 18 bytes per parameter, and 4 more once there is a best to keep."""
    eval_data = 0.5 if patience else None
    adapter = {"r": 8, "rank_pattern": {"q_proj": 16}}
    spec = job_spec(name, adapter=adapter, early_stopping_patience=patience, eval_data=eval_data)
    return SimpleNamespace(
        name=name,
        spec=spec,
        num_parameters=num_parameters,
        num_reference_parameters=0,
        reference_bytes=0,
        kernel_bytes=0,
        progress=SimpleNamespace(has_best=False),
        is_alive=True,
        longest=512,
        allocated=18 * num_parameters if slot else 0,
    )


def test_memory_when_it_ran_out_then_the_attempt_counts_neither_as_measured_nor_as_proven(monkeypatch):
    """Microbatches of half the size leave room for another job, as soon as they are made smaller."""
    gpu = FakeGpu(monkeypatch, fake_job("a", 1))
    placement, late = gpu.placement, fake_job("late", None, num_parameters=15 * 10**8)
    with placement.watched(8192):
        gpu.run(50 * 10**9)
    with placement.watched(8192):
        gpu.run(78 * 10**9 - gpu.allocated)
        placement.ran_out()
    assert placement._proven_bytes == 0 and not placement._memory.has_peaks
    with pytest.raises(JobError, match="can never fit"):
        placement.check(late, 8192)
    placement.check(late, 4096)
    with placement.watched(8192):
        gpu.run(25 * 10**9, 4096)
    assert placement._proven_bytes == placement.bytes_of(fake_job("a", 1)), "the next stretch is noted again"
    placement.check(late, 4096)


@pytest.mark.parametrize("patience", [None, 3])
def test_memory_when_measured_then_all_but_what_the_jobs_hold_is_not_for_jobs(monkeypatch, patience):
    """A best that there is not yet is no part of the peak."""
    jobs = [fake_job(f"job{i}", i + 1, patience) for i in range(8)]
    gpu = FakeGpu(monkeypatch, *jobs)
    estimate = gpu.weights + 50 * 10**9
    assert gpu.besides == estimate
    for number in range(1, ENOUGH + 1):
        with gpu.placement.watched(8192):
            gpu.run(40 * 10**9)
            for job in jobs:
                job.progress.has_best = patience is not None
        for job in jobs:
            job.progress.has_best = False
        if number < ENOUGH:
            assert gpu.besides == math.ceil(estimate * (1 - MARGIN)), "a few peaks lower the estimate by the margin"
    assert gpu.besides == pytest.approx(gpu.weights + 40 * 10**9, rel=0.01)
    with gpu.placement.watched(8192):
        gpu.run(45 * 10**9)
    assert gpu.besides >= gpu.weights + 45 * 10**9, "no measured peak is above the prediction"


def test_run_when_a_cpu_has_memory_for_one_job_then_they_train_one_by_one_to_the_same_bits(backbone, monkeypatch):
    """The measured peak of the process, far above the estimate, is what lets no second job in."""
    gib = 2**30
    memory = SimpleNamespace(resident=gib, peak=gib, limit=4 * gib)
    monkeypatch.setattr(memory_of, "resident_bytes", lambda: memory.resident)
    monkeypatch.setattr(memory_of, "available_bytes", lambda: memory.limit - memory.resident)
    monkeypatch.setattr(memory_of, "peak_resident_bytes", lambda: memory.peak)
    monkeypatch.setattr(memory_of, "reset_peak_resident", lambda: None)

    def run(limit: int) -> tuple[Any, list[str]]:
        memory.limit = limit
        engine, waits = Engine(backbone, capacity=48), []

        def on_event(_: object, event: Event) -> None:
            if isinstance(event, MicrobatchDone) and "late" not in engine.jobs:
                memory.peak = 3 * gib
                submit(engine, small_job("late", 1))
            waits.extend([event.job] if isinstance(event, JobWaiting) else [])

        submit(engine, small_job("a"))
        return finish(engine, on_event), waits

    alone, _ = run(64 * gib)
    memory.peak = gib
    found, waits = run(3 * gib)
    assert waits == ["late"]
    for name in ("a", "late"):
        assert_same_bits(found[name], alone[name])


class PerToken(Placement):
    """Places where every token of a microbatch takes its bytes from the jobs."""

    token_bytes, total_bytes = 0, 0

    def _budget(self, capacity: int) -> Budget:
        return Budget(self.total_bytes, capacity * self.token_bytes)


@pytest.fixture
def per_token(backbone, monkeypatch) -> type[PerToken]:
    """A device where a job of `small_job` fits beside microbatches of up to 20 tokens."""
    monkeypatch.setattr("weft.engine.engine.Placement", PerToken)
    engine = Engine(backbone, capacity=48)
    PerToken.token_bytes, PerToken.total_bytes = 10**6, 10**9
    submit(engine, small_job("size"))
    job_bytes = engine._placement.bytes_of(engine.jobs["size"])
    PerToken.total_bytes = 20 * 10**6 + job_bytes
    return PerToken


def test_run_when_microbatches_leave_no_memory_then_they_are_made_smaller_and_it_is_reported(backbone, per_token):
    """The requested capacity is halved until a job fits; no job is refused because of it."""
    engine = Engine(backbone, capacity=48)
    submit(engine, small_job("a"))
    warnings = warned(engine)
    assert engine.limits.capacity == max(12, engine.jobs["a"].longest)
    assert warnings == [f"microbatches of 48 tokens would leave no memory for a job on this device; they hold at most "
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
    rows = 2 * made.path.row_tile(200)
    kept = model.kept_bytes(rows, 32) - (model.offloaded_bytes(rows) if offload else 0)
    assert kept > 0 and model.offloaded_bytes(rows) > 0
    assert made.path.activation_bytes(200, 32) == kept + model.workspace_bytes(rows, 32) + model.loss_bytes()


def test_activation_bytes_when_estimated_then_count_what_linears_norms_attention_and_activation_keep(backbone):
    # llama_odd, per layer: q, k, v and o 36 x 36, gate and up 36 x 50, down 50 x 36; two layers, four bytes.
    linears = (2 * 36 + 4 * 36) + (36 + 50 + 2 * 50 + 36)
    assert backbone.path.activation_bytes(10, 16) == 10 * 4 * (2 * (linears + 2 * 36 + 36 + 50) + 36)


@pytest.mark.parametrize(
    ("capacity", "max_jobs", "found"), [("auto", None, 4096), ("auto", 1, 8192), (8192, None, 8192)]
)
def test_run_when_large_microbatches_would_make_jobs_wait_then_only_a_number_keeps_them(
    backbone, per_token, monkeypatch, capacity, max_jobs, found
):
    """Two jobs fit beside microbatches of 5,000 tokens, one beside 8,192, which it cannot fill: `auto` gives way."""
    monkeypatch.setattr("weft.engine.engine.capacities", lambda given, _, longest: capacities(given, "cuda", longest))
    engine = Engine(backbone, capacity=capacity, max_jobs=max_jobs)
    submit(engine, small_job("a"), small_job("b", 1))
    each = engine._placement.bytes_of(engine.jobs["a"])
    per_token.token_bytes = each // 4000
    per_token.total_bytes = 2 * each + 5000 * per_token.token_bytes
    warnings = warned(engine)
    assert engine.limits.capacity == found
    sentence = "microbatches of 8192 tokens would leave no memory for enough jobs to fill them on this device;"
    assert [message[: len(sentence)] for message in warnings] == ([sentence] if found == 4096 else [])


@pytest.mark.parametrize(("num_fitting", "capacity", "found"), [(1, 20, True), (1, 60, False), (2, 60, True)])
def test_microbatches_when_not_all_jobs_fit_beside_them_then_those_that_do_can_fill_them_or_not(
    backbone, per_token, num_fitting, capacity, found
):
    """Global batches of 30 tokens: one job fills a microbatch of 20 but not one of 60."""
    engine = Engine(backbone, capacity=64)
    data = JobData(dataset([random_sample(np.random.default_rng(n), 10) for n in range(6)]), None)
    for name in ("a", "b", "c"):
        engine.submit(job_spec(name, global_batch_size=3), data)
    each = engine._placement.bytes_of(engine.jobs["a"])
    per_token.token_bytes, per_token.total_bytes = 1, num_fitting * each + capacity
    assert engine._placement.can_fill(capacity) is found
    per_token.total_bytes = None
    assert engine._placement.can_fill(capacity), "there is no limit"


def test_capacity_when_it_is_auto_then_holds_the_longest_sample_of_the_run(backbone):
    assert Engine(backbone).limits.capacity == 2048
    assert Engine(backbone, longest=3000).limits.capacity == 4096
    assert Engine(backbone, capacity=100, longest=50).limits.capacity == 100
