"""Stages in processes of their own give the bits of one device, and end together in a sentence."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_model import small_model
from staged_models import assert_same_answers
from tiny_models import assert_same_bits, finish, job_spec, random_data, submit, train

from weft.data.dataset import JobData
from weft.engine.engine import Engine
from weft.model.load import load_backbone
from weft.model.resolve import resolve
from weft.model.source import load_tokenizer
from weft.objectives.preference import Dpo
from weft.parallel.stages.load_stages import StageLayout, find_parts, load_stages
from weft.parallel.stages.stage_pool import StageLostError, StageProcesses
from weft.parallel.stages.staged import StagedExecutor
from weft.plan.cost.types import LinearCost
from weft.plan.layout import DispatchRule
from weft.plan.pipeline.build import PipelinePlanner, Schedule
from weft.plan.spread import SpreadPlanner
from weft.process_memory import available_bytes
from weft.spec import BackboneSpec

SPEC = BackboneSpec(str(small_model(4)), device="cpu")


@pytest.fixture
def stages() -> Iterator[StageProcesses]:
    group = StageProcesses(SPEC, find_parts(resolve(SPEC), 2), silent_s=10.0)
    yield group
    group.close()
    assert all(process.poll() is not None for process in group.processes)


def jobs(**more: Any) -> list[Any]:
    settings = {"max_steps": 2, "max_grad_norm": 0.1, "eval_steps": 1, "eval_data": 2, **more}
    spec = job_spec("job", adapter={"lora_dropout": 0.1}, **settings)
    return [(spec, random_data(1, num_samples=6, num_eval=2))]


def paired() -> Any:
    """A job that compares with the bare backbone."""
    data = random_data(2, num_samples=6, num_eval=2, lengths=(3, 12))
    parts = [replace(part, objective=Dpo(0.3)) for part in (data.train, data.eval) if part is not None]
    return job_spec("paired", max_steps=2, global_batch_size=2, eval_steps=1, eval_data=1), JobData(*parts)


def engine_on(stages: StageProcesses) -> Engine:
    tokenizer: Any = load_tokenizer(SPEC.base_model)
    planner: Any = SpreadPlanner((1, 1), (LinearCost(), LinearCost()), dispatch=DispatchRule.EVEN)
    if len(stages.replica_sizes) == 1:
        planner = PipelinePlanner(Schedule.ONE_F_ONE_B, *stages.replica_sizes)
    return Engine(StagedExecutor(stages, tokenizer), capacity=32, planner=planner)


def assert_may_fork(child: Path) -> None:
    """The server that has forked a process has one thread and no GPU: forks would lack other threads and lose a GPU."""
    server = child.parent / (child / "stat").read_text().rpartition(")")[2].split()[1]
    assert server.name != str(os.getpid())
    assert len(list((server / "task").iterdir())) == 1
    assert not [file for file in (server / "fd").iterdir() if os.readlink(file).startswith("/dev/nvidia")]


def check_until_lost(stages: StageProcesses) -> None:
    while True:
        stages.check()


def test_job_when_its_stages_are_processes_then_has_the_bits_of_one_device(stages):
    """Any thread may call them. When one of them is killed, all end, and every caller gets a sentence."""
    own = [*jobs(), paired()]
    one = Engine(load_backbone(SPEC), capacity=32)
    submit(one, *own)
    expected = finish(one)
    assert_may_fork(Path(f"/proc/{stages.processes[0].pid}"))
    engine = engine_on(stages)
    submit(engine, *own)
    for name, outcome in finish(engine).items():
        assert_same_bits(outcome, expected[name])
    assert_same_answers(engine, one, ["job"])
    sizes = [64 * n for n in range(1, 41)]
    alone = [stages.call_all("activation_bytes", rows, []) for rows in sizes]
    with ThreadPoolExecutor(4) as threads:
        assert alone == list(threads.map(lambda rows: stages.call_all("activation_bytes", rows, []), sizes))
    left = [memory.usable_bytes - memory.allocated_bytes for memory in stages.call_all("memory")]
    assert max(left) < 0.75 * (available_bytes() or 0), "both share the memory of this machine"
    os.kill(stages.processes[1].pid, signal.SIGKILL)
    lost = "stage 1: was ended by signal 9, so all stages were ended"
    with pytest.raises(StageLostError, match=lost):
        check_until_lost(stages)
    with pytest.raises(StageLostError, match=lost):
        engine.executor.row_tile(32)
    assert stages.processes[0].poll() is not None


def test_run_when_a_stage_stands_still_then_all_are_ended_before_long(stages):
    """No call waits for ever for a process that was stopped."""
    engine = engine_on(stages)
    submit(engine, *jobs())
    os.kill(stages.processes[0].pid, signal.SIGSTOP)
    with pytest.raises(StageLostError, match="stage 0: gave no sign of life for 10 s, so all stages were ended"):
        engine.run()


@pytest.mark.parametrize(
    ("sizes", "num_steps"), [((1, 1), 2), pytest.param((1, 2), 20, marks=pytest.mark.slow)], ids=["alike", "unlike"]
)
def test_jobs_when_replicas_are_processes_then_have_the_bits_of_one_device(sizes, num_steps):
    """Two that are spread over both, with dropout and clipping, and two at home on one; where no adapter is cut, two
    have moments of 8 bits. When a process of one is killed, all end."""
    settings = {"max_steps": num_steps, "max_grad_norm": 0.1, "adapter": {"lora_dropout": 0.1}}
    sums = {"a": "any_order", "b": "any_order", "c": "in_order", "d": "in_order"}
    lean = {"a": "adamw_8bit", "c": "adamw_8bit"} if max(sizes) == 1 else {}
    own: list[Any] = [
        (job_spec(name, gradient_sum=kind, optim=lean.get(name, "adamw"), **settings), random_data(seed, num_samples=9))
        for seed, (name, kind) in enumerate(sums.items())
    ]
    expected = train(load_backbone(SPEC), own, capacity=32)
    executor = load_stages(resolve(SPEC), StageLayout(sizes))
    try:
        engine = Engine(executor, capacity=32, planner=SpreadPlanner(sizes, (LinearCost(), LinearCost())))
        submit(engine, *own)
        for name, outcome in finish(engine).items():
            assert_same_bits(outcome, expected[name])
        processes = executor.stages.processes  # type: ignore[attr-defined]
        os.kill(processes[0].pid, signal.SIGKILL)
        with pytest.raises(StageLostError, match="replica 0: was ended by signal 9, so all replicas were ended"):
            executor.row_tile(32)
        assert all(process.poll() is not None for process in processes)
    finally:
        executor.close()


@pytest.mark.parametrize(
    ("settings", "degrees", "where"),
    [({}, (2,), "stage 0"), ({"kernels": "fused", "quantize": "int8"}, (2, 1), "replica 0")],
    ids=["reference", "fused int8 beside one device"],
)
def test_job_when_processes_share_a_stage_then_ends_near_one_device_and_they_end_together(settings, degrees, where):
    """One is enough to lose the stage. Beside it, another replica has the layers whole and some of the samples."""
    spec = replace(SPEC, **settings)
    # Where a gradient is nearly zero, AdamW makes a step of its rounding.
    given = jobs(optim="sgd", gradient_sum="in_order" if len(degrees) == 1 else "any_order")
    expected = train(load_backbone(spec), given, capacity=32)["job"]
    parts = [find_parts(resolve(spec), 1, tensor=degree) for degree in degrees]
    group = StageProcesses(spec, *parts, tensor=degrees, silent_s=10.0)
    try:
        engine = engine_on(group)
        submit(engine, *given)
        found = finish(engine)["job"]
        assert found.losses == pytest.approx(expected.losses, rel=1e-5)
        assert found.eval_losses == pytest.approx(expected.eval_losses, rel=1e-5)
        for path, tensors in expected.adapter.items():
            assert all(x.allclose(y, atol=1e-5) for x, y in zip(tensors, found.adapter[path], strict=True)), path
        os.kill(group.processes[1].pid, signal.SIGKILL)
        with pytest.raises(StageLostError, match=f"{where}, device 1: was ended by signal 9, so all "):
            engine.executor.row_tile(32)
        assert all(process.poll() is not None for process in group.processes)
    finally:
        group.close()
