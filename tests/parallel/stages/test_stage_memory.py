"""Stages that run out of memory say so in a sentence, and a job has a seat on all stages or on none."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from staged_models import staged_executor
from tiny_models import finish, small_job, submit

from weft.engine.engine import Engine
from weft.engine.execute.protocol import ReplicaFaultError, ReplicaMemory, ReplicaMemoryError
from weft.errors import ConfigError
from weft.parallel.stages.stage_process import StageMemoryError, sendable
from weft.parallel.stages.staged import StagedExecutor
from weft.plan.pipeline.build import PipelinePlanner, Schedule

OUT = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class OnGpus:
    """Answers for three stages on GPUs: a replica of two, and one of one."""

    def __init__(self, memory: list[ReplicaMemory]) -> None:
        self.replica_sizes = [2, 1]
        facts = staged_executor("llama", (1, 1)).stages.call_all("facts")[0]
        self._answers = {"facts": replace(facts, device_kind="cuda"), "activation_bytes": 5}
        self._memory = memory

    def call_all(self, what: str, *given: Any) -> list[Any]:
        return self._memory if what == "memory" else [self._answers[what]] * 3


@pytest.mark.parametrize(
    ("usable", "held", "found"),
    [
        # The second stage has 10 left, so two stages count with 20; the other replica has 25.
        ((100, 40, 30), (50, 30, 5), ReplicaMemory(80 + 20, 80)),
        # The other replica has only 15.
        ((100, 40, 20), (50, 30, 5), ReplicaMemory(20, 5)),
    ],
)
def test_memory_when_stages_have_unlike_room_then_is_that_of_the_fullest(usable, held, found):
    """Nothing is promised to a job that one of its stages could not hold."""
    stages: Any = OnGpus([ReplicaMemory(*pair) for pair in zip(usable, held, strict=True)])
    executor = StagedExecutor(stages, None)  # type: ignore[arg-type]
    assert executor.memory() == found
    # The first stage of two holds two microbatches of 5, and the second counts with as much.
    assert executor.activation_bytes(32, []) == 20


def test_seat_when_one_stage_has_no_memory_then_no_stage_has_it():
    executor = staged_executor("llama", (1, 1))
    engine = Engine(executor, capacity=48, planner=PipelinePlanner(Schedule.ONE_F_ONE_B, 2))
    spec, data = small_job("job")
    engine.submit(spec, data)
    first, second = executor.stages.stages  # type: ignore[attr-defined]
    second.local.seat = raising(ReplicaMemoryError("none left"))
    with pytest.raises(ReplicaMemoryError):
        executor.seat("job")
    assert first.weights_of("job").slot is None
    del second.local.seat
    executor.seat("job")
    assert first.weights_of("job").slot is not None and second.weights_of("job").slot is not None


def raising(error: Exception) -> Any:
    def seat(_: str) -> None:
        raise error

    return seat


@pytest.mark.parametrize("error", [OUT, ReplicaMemoryError("none left"), RuntimeError("CUDA error: out of memory")])
def test_error_when_memory_ends_in_a_stage_then_is_one_sentence_that_ends_the_run(error):
    """It crosses a pipe, and counts as a fault of the replica and of no job."""
    told = pickle.loads(pickle.dumps(sendable(error, 3, "run")))
    assert isinstance(told, StageMemoryError) and isinstance(told, ReplicaFaultError)
    assert str(told).startswith("stage 3: its GPU ran out of memory; lower capacity, set recompute: full, or divide")


def test_error_when_it_is_another_then_is_told_as_it_is():
    full = ReplicaMemoryError("none left")
    assert sendable(full, 3, "seat") is full
    refused = ConfigError("no.")
    assert sendable(refused, 3, "run") is refused
    assert str(sendable(KeyError("a"), 3, "run")) == "KeyError: 'a'"


def test_program_when_kernels_are_being_compiled_then_waits_for_them_once():
    """One process compiles for all stages."""

    class Ahead:
        is_ready = False
        num_waits = 0

        def wait(self) -> None:
            self.num_waits += 1

    ahead: Any = Ahead()
    executor = staged_executor("llama", (1, 1))
    executor = StagedExecutor(executor.stages, executor.tokenizer, ahead=ahead)
    assert executor.is_compiling
    engine = Engine(executor, capacity=48, planner=PipelinePlanner(Schedule.ONE_F_ONE_B, 2))
    submit(engine, small_job("job", max_steps=2))
    assert finish(engine)["job"].state == "succeeded"
    assert ahead.num_waits == 1 and not executor.is_compiling and executor.compiling_s() > 0
