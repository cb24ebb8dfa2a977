"""Stages that run out of memory report it in a sentence, and a job has a seat on all stages or on none."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from staged_models import staged_executor
from tiny_models import Job, assert_same_bits, finish, random_backbone, small_job, submit, train

from weft.engine.engine import Engine
from weft.engine.events import Event, JobWaiting, StepDone
from weft.engine.execute.memory import PeakMeter
from weft.engine.execute.protocol import MemoryPeak, ReplicaFaultError, ReplicaMemory, ReplicaMemoryError
from weft.errors import ConfigError
from weft.kernels.device import CPU
from weft.parallel.stages.stage_process import StageMemoryError, sendable
from weft.parallel.stages.staged import StagedExecutor
from weft.parallel.stages.work import StageOutcome
from weft.plan.admit import MARGIN
from weft.plan.cost.types import LinearCost
from weft.plan.pipeline.build import PipelinePlanner, Schedule
from weft.plan.simulate.choose import FastestPipeline
from weft.store.run_dir import RunDirectory, RunRecord

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
    received = pickle.loads(pickle.dumps(sendable(error, 3, "run")))
    assert isinstance(received, StageMemoryError) and isinstance(received, ReplicaFaultError)
    assert str(received).startswith(
        "stage 3: its GPU ran out of memory; lower capacity, set recompute: full, or divide"
    )


def test_error_when_it_is_another_then_is_reported_as_it_is():
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


class SlowEnd(LinearCost):
    """Two stages, the first of which would run far ahead."""

    def forward_s(self, lengths: Sequence[int], stage: int) -> float:
        return (1.0, 5.0)[stage] * sum(lengths)

    def backward_s(self, lengths: Sequence[int], stage: int) -> float:
        return self.forward_s(lengths, stage)


def jobs() -> list[Job]:
    settings = {"max_steps": 4, "global_batch_size": 12, "save_steps": 1}
    return [small_job("a", **settings), small_job("b", 1, **settings)]


def engine_with(limit: int = 99) -> tuple[Engine, list[list[int]]]:
    """An engine on two stages, whose memory ends at so many microbatches in flight; and how many each has held."""
    executor = staged_executor("llama", (1, 1))
    held: list[list[int]] = []
    for stage in executor.stages.stages:  # type: ignore[attr-defined]
        held.append([])
        counted(stage.runner, held[-1], limit)
    return Engine(executor, capacity=48, planner=FastestPipeline(2, SlowEnd())), held


def counted(runner: Any, held: list[int], limit: int) -> None:
    forward, backward, present = runner.forward, runner.backward, set[int]()

    def forward_within(k: int, *given: Any) -> Any:
        present.add(k)
        held.append(len(present))
        if len(present) > limit:
            raise OUT
        return forward(k, *given)

    def backward_then(k: int, *given: Any) -> Any:
        present.discard(k)
        return backward(k, *given)

    runner.forward, runner.backward = forward_within, backward_then


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return train(random_backbone("llama", num_hidden_layers=2), jobs(), capacity=48)


def test_run_when_stages_have_little_memory_then_plans_for_what_is_left_beside_its_jobs(expected):
    engine, held = engine_with()
    executor: Any = engine.executor
    submit(engine, *jobs())
    spec = [job.spec.adapter for job in engine.jobs.values()]
    (each, _), sizes = executor.stages.call_all("activation_bytes", 48, spec), engine.jobs.values()
    seats = sum(engine.bytes_of(job) for job in sizes) / 2
    for spare in (0.5, 30, 2.5):
        executor._at_rest = [ReplicaMemory(math.ceil((7 + seats + spare * each) * (1 + MARGIN)), 7)] * 2
        found = executor.in_flight(48, spec, {job.name: engine.bytes_of(job) for job in sizes})
        assert found[0] == max(1, int(spare)), "both have half of the adapters"
    for name, outcome in finish(engine).items():
        assert_same_bits(outcome, expected[name])
    assert max(held[0]) == 2


def test_run_when_its_stages_run_out_of_memory_then_goes_on_with_less_to_the_bits_of_one_device(tmp_path, expected):
    """It ends, as its stages do, and starts again from the last checkpoints: with half in flight, then a quarter."""
    found: dict[str, Any] = {}
    for num_lessened in range(3):
        engine, held = engine_with(limit=1)
        notes = [engine.lessen(48) for _ in range(num_lessened)]
        submit(engine, *jobs())
        with RunDirectory.open(tmp_path / "run", resume=num_lessened > 0) as directory:
            if not num_lessened:
                directory.write_run(RunRecord(base_model="tiny", capacity=48))
            engine.keep_in(directory)
            if num_lessened < 2:
                with pytest.raises(torch.OutOfMemoryError):
                    engine.run()
            else:
                found = finish(engine)
        assert max(held[0]) == (1 if num_lessened == 2 else 2)
    assert notes[-1] == "stages ran out of memory: they hold at most 1 microbatch in flight, of 48 tokens each."
    for name, outcome in found.items():
        assert_same_bits(outcome, expected[name])
    assert engine.lessen(48) is None


GIB = 2**30


class Reported(PeakMeter):
    """Counts tokens, and reports a peak of so many bytes."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(CPU)
        self.num_bytes = num_bytes

    def pop(self) -> MemoryPeak | None:
        found = super().pop()
        return None if found is None else replace(found, num_bytes=self.num_bytes)


@pytest.mark.parametrize("appended", [False, True])
@pytest.mark.parametrize(("peaks", "waits"), [((3.9, 2), True), ((2, 3.9), True), ((2, 2), False)], ids=str)
def test_run_when_one_stage_has_a_high_peak_then_no_other_job_is_let_in_and_bits_stay(
    expected, monkeypatch, peaks, waits, appended
):
    """Of 4 GiB on each of two stages: the fuller one decides, whichever it is. Peaks come back with programs."""
    executor = staged_executor("llama", (1, 1))
    stages: Any = executor.stages
    for stage, peak in zip(stages.stages, peaks, strict=True):
        stage.memory = lambda: ReplicaMemory(4 * GIB, GIB)
        stage.meter = Reported(int(peak * GIB))
    planner = FastestPipeline(2, LinearCost()) if appended else PipelinePlanner(Schedule.ONE_F_ONE_B, 2)
    engine, waiting, calls = Engine(executor, capacity=48, planner=planner), list[str](), list[str]()
    (first, late), call_each = jobs(), stages.call_each

    def act(engine: Engine, event: Event) -> None:
        if isinstance(event, StepDone) and "b" not in engine.jobs:
            submit(engine, late)
        waiting.extend([event.job] if isinstance(event, JobWaiting) else [])

    monkeypatch.setattr(stages, "call_each", lambda what, given: (calls.append(what), call_each(what, given))[1])
    submit(engine, first)
    for name, outcome in finish(engine, act).items():
        assert_same_bits(outcome, expected[name])
    assert waiting == ["b"] * waits
    spans = [span for span in engine.timeline.spans if span.name == "memory"]
    assert {(span.stage, span.args["peak_bytes"]) for span in spans} == {*enumerate(int(p * GIB) for p in peaks)}
    tokens = [max(span.args["tokens"] for span in spans if span.stage == stage) for stage in (0, 1)]
    assert tokens[0] > 48 >= tokens[1] > 24, "the first holds two microbatches"
    seated = len(calls) - calls[::-1].index("seat")
    assert {*calls[seated : calls.index("unseat", seated)]} <= {"run"}, "no call between programs"


def test_peak_when_a_job_has_come_or_gone_since_its_program_began_then_is_not_compared_with_what_jobs_hold():
    executor = staged_executor("llama", (1, 1))
    outcomes = [StageOutcome(peak=MemoryPeak(GIB, 48)), StageOutcome()]
    submit(Engine(executor, capacity=48), small_job("a"))
    for seat in (executor.seat, executor.unseat):
        before = executor._jobs.num_seatings
        executor.account.observe(outcomes, before)
        assert executor.account.pop_peaks() == [[MemoryPeak(GIB, 48)], []]
        seat("a")
        executor.account.observe(outcomes, before)
        assert executor.account.pop_peaks() == [[], []]


def test_shares_when_a_thread_has_dropped_a_job_meanwhile_then_it_takes_nothing():
    assert staged_executor("llama", (1, 1)).account.shares({"gone": GIB}) == [0.0, 0.0]
