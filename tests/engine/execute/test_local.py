"""The executor of this process keeps to the protocol: plain data goes in and comes out, and no bit depends on it."""

from __future__ import annotations

import pickle
from typing import Any, TypeVar

import pytest
import torch
from tiny_models import assert_same_bits, finish, job_spec, random_data, shallow_backbone, small_job, submit, train

from weft.engine.engine import Engine
from weft.engine.execute.local import LocalExecutor
from weft.engine.execute.protocol import (
    AddedJob,
    EvaluationWork,
    MicrobatchWork,
    NewJob,
    ReplicaMemoryError,
    StateWork,
    StepOrder,
    StepsWork,
)
from weft.engine.jobs.live_job import LiveJob
from weft.model.packed import PackedBatch
from weft.plan.types import Microbatch, Segment

Item = TypeVar("Item")


def piped(item: Item) -> Item:
    """What another process would get."""
    return pickle.loads(pickle.dumps(item))  # type: ignore[no-any-return]


class Piped(LocalExecutor):
    """An executor that might as well be in another process."""

    def __init__(self, backbone: Any) -> None:
        super().__init__(backbone)
        self.facts = piped(self.facts)

    def add(self, job: NewJob) -> AddedJob:
        return piped(super().add(piped(job)))

    def restore(self, job: str, tensors: dict[str, torch.Tensor]) -> None:
        super().restore(job, piped(tensors))

    def prepare(self, work: MicrobatchWork) -> None:
        super().prepare(piped(work))

    def start(self, work: Any) -> Any:
        return piped(super().start(piped(work)))

    def wait(self, ticket: Any) -> Any:
        return piped(super().wait(piped(ticket)))


def jobs() -> list[Any]:
    early = {"eval_data": 2, "eval_steps": 2, "early_stopping_patience": 9, "max_steps": 6}
    evaluated = (job_spec("evaluated", seed=3, adapter={"lora_dropout": 0.2}, **early), random_data(3, num_eval=2))
    return [small_job("a"), small_job("b", 1, global_batch_size=7), evaluated]


def test_run_when_all_that_crosses_the_protocol_is_pickled_then_no_bit_changes():
    """Jobs, work, tickets and outcomes are plain data, so the other side can be another process."""
    expected = train(shallow_backbone("llama_odd"), jobs(), capacity=48)
    engine = Engine(Piped(shallow_backbone("llama_odd")), capacity=48)
    submit(engine, *jobs())
    for name, outcome in finish(engine).items():
        assert_same_bits(outcome, expected[name])


@pytest.fixture
def executor() -> LocalExecutor:
    """With a job that has no seat yet."""
    spec, data = small_job("a")
    found = LocalExecutor(shallow_backbone("llama_odd"))
    found.add(NewJob(spec, LiveJob(spec, data).progress.batches, None))
    return found


def microbatch(executor: LocalExecutor) -> MicrobatchWork:
    length = executor.jobs["a"].given.batches.lengths(0)[0]
    return MicrobatchWork(Microbatch((Segment("a", 0, 0, length),)), executor.row_tile(48))


def test_microbatch_when_made_ready_before_a_job_moved_then_is_made_again(executor, monkeypatch):
    """The slot it was made for is another job's by then."""
    executor.seat("a")
    executor.prepare(microbatch(executor))
    executor.unseat("a")
    other, data = small_job("other", 5)
    executor.add(NewJob(other, LiveJob(other, data).progress.batches, None))
    executor.seat("other")
    executor.seat("a")
    launched: list[PackedBatch] = []
    launch = executor.backbone.launch
    monkeypatch.setattr(executor.backbone, "launch", lambda batch, tile: launched.append(batch) or launch(batch, tile))
    executor.wait(executor.start(microbatch(executor)))
    assert launched[0].segment_slots == (executor.jobs["a"].weights.slot,)


def test_steps_when_started_behind_a_microbatch_that_was_waited_for_then_are_taken(executor):
    """An evaluation in between waits for the microbatch first."""
    executor.seat("a")
    before = executor.wait(executor.start(StateWork("a")))
    ticket = executor.start(microbatch(executor))
    assert len(executor.wait(ticket).scores) == 1
    (updated,) = executor.wait(executor.start(StepsWork((StepOrder("a", 1e-2, True),), ticket)))
    after = executor.wait(executor.start(StateWork("a")))
    assert not updated.skipped and updated.grad_norm > 0
    assert not before["params_b"].equal(after["params_b"])


def test_memory_when_it_ends_then_is_the_protocols_error_and_the_state_is_whole(executor, monkeypatch):
    def no_room(*_: Any) -> Any:
        raise RuntimeError("Triton Error [CUDA]: out of memory")

    before = executor.wait(executor.start(StateWork("a")))
    with monkeypatch.context() as full:
        full.setattr(executor.backbone, "attach", no_room)
        with pytest.raises(ReplicaMemoryError):
            executor.seat("a")
    executor.seat("a")
    monkeypatch.setattr(executor.backbone, "launch", no_room)
    with pytest.raises(ReplicaMemoryError):
        executor.start(microbatch(executor))
    executor.unseat("a")
    after = executor.wait(executor.start(StateWork("a")))
    assert all(before[name].equal(after[name]) for name in before)


def test_microbatches_when_never_waited_for_then_only_the_last_two_are_held(executor):
    """Some remain when memory runs out; they must not pile up."""
    executor.seat("a")
    tickets = [executor.start(microbatch(executor)) for _ in range(4)]
    assert set(executor._started) == {ticket.number for ticket in tickets[-2:]}


def test_evaluation_when_the_job_has_no_seat_then_it_gets_one_for_as_long_as_it_takes():
    """Sweeps evaluate jobs that have ended or wait, and take no slot from the others."""
    executor = LocalExecutor(shallow_backbone("llama_odd"))
    spec, data = job_spec("evaluated", eval_data=2), random_data(3, num_eval=2)
    executor.add(NewJob(spec, LiveJob(spec, data).progress.batches, data.eval))
    work = EvaluationWork(("evaluated",), 48, executor.row_tile(48))
    waiting = executor.wait(executor.start(work)).parts
    assert executor.jobs["evaluated"].weights.slot is None
    assert not any(linear.slots for linear in executor.backbone.linears.values())
    executor.seat("evaluated")
    seated = executor.wait(executor.start(work)).parts
    assert waiting == seated
    assert executor.jobs["evaluated"].weights.slot is not None


def test_executor_beside_another_when_it_has_a_job_of_the_same_name_then_the_other_keeps_its_own(executor):
    """Trials are measured alone on the replica that has trained them."""
    beside = executor.beside()
    spec, data = small_job("a")
    beside.add(NewJob(spec, LiveJob(spec, data).progress.batches, None))
    beside.drop("a")
    assert "a" in executor.jobs and beside.backbone is executor.backbone
