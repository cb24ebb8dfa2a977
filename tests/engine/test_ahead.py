"""A device that works on gets its next microbatch before the last one is looked at; no bits change."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from covering import chosen, each_value
from tiny_models import (
    Outcome,
    assert_same_bits,
    dataset,
    finish,
    job_spec,
    random_data,
    random_model,
    shallow_backbone,
    small_job,
    submit,
    taken_slots,
    train,
)

from weft.data.dataset import JobData
from weft.data.samples import Sample
from weft.engine.engine import Engine
from weft.engine.events import EvalDone, Event, JobFailed, JobWarning, MicrobatchDone, StepDone
from weft.engine.execute import microbatch as step_module
from weft.errors import JobError
from weft.job_state import JobState
from weft.kernels.device_event import DeviceEvent
from weft.model.backbone import Backbone
from weft.model.objective_loss import LossPass
from weft.model.packed import PackedBatch, SlotSample, pack_samples
from weft.model.path import PendingScores


class Ahead(Backbone):
    """A backbone that is taken for one that works on; it notes when something is started and when it is looked at."""

    works_on = True

    def __init__(self, model: str = "llama_odd", kernels: str = "reference") -> None:
        super().__init__(random_model(model, num_hidden_layers=1), SimpleNamespace(eos_token_id=None), "ahead")
        self.use_kernels(kernels)
        self.log: list[str] = []
        self.room = 10**6
        self.eval_room = 10**6

    def launch(self, batch: PackedBatch, row_tile: int | None) -> PendingScores:
        self.log.append("start")
        running = super().launch(batch, row_tile)
        if batch.num_tokens > self.room:
            self.room = 10**6
            raise torch.OutOfMemoryError("no room, with half of the gradients written")
        scores = running.scores
        running.scores = lambda: self.log.append("look") or scores()  # type: ignore[method-assign]
        return running

    def look(self, batch: PackedBatch, row_tile: int | None) -> PendingScores:
        if batch.num_tokens > self.eval_room:
            self.eval_room = 10**6
            raise torch.OutOfMemoryError("no room")
        return super().look(batch, row_tile)


def jobs() -> list[Any]:
    """Global batches of one and of several microbatches; ends at different times."""
    evaluated = (job_spec("d", seed=3, eval_data=2, eval_steps=2, max_steps=9), random_data(3, num_eval=2))
    return [small_job("a"), small_job("b", 1, max_steps=12, global_batch_size=7), small_job("c", 2), evaluated]


@pytest.fixture(scope="module")
def expected() -> dict[str, Outcome]:
    return train(shallow_backbone("llama_odd"), jobs(), capacity=48)


def test_microbatch_when_the_device_works_on_then_is_started_before_the_last_is_looked_at(expected):
    """With a step between them or not; the device has something to do whatever the host does."""
    backbone = Ahead()
    outcomes = train(backbone, jobs(), capacity=48)
    for name, outcome in outcomes.items():
        assert_same_bits(outcome, expected[name])
    depth, waits = 0, 0
    for what in backbone.log:
        depth += 1 if what == "start" else -1
        assert 0 <= depth <= 2
        waits += depth == 0
    assert backbone.log.count("start") == backbone.log.count("look") > 20
    # Where a program or the run ends, nothing is known to follow.
    assert waits < backbone.log.count("start") // 4


def test_steps_when_the_next_microbatch_follows_on_fused_kernels_then_it_reads_the_stepped_weights():
    """Kernels read a copy of the weights, which must follow a step that was not waited for."""
    expected = train(shallow_backbone("llama", kernels="fused"), jobs(), capacity=48)
    outcomes = train(Ahead("llama", "fused"), jobs(), capacity=48)
    for name, outcome in outcomes.items():
        assert_same_bits(outcome, expected[name])


@pytest.mark.parametrize("holds", [False, True], ids=["leaves", "holds on"])
def test_reader_when_it_leaves_after_any_event_then_nothing_is_lost_or_counted_twice(expected, holds):
    """Also if the reader keeps what it no longer reads."""
    engine = Engine(Ahead(), capacity=48)
    submit(engine, *jobs())
    readers = []
    while any(not job.state.is_final for job in engine.jobs.values()):
        reader = engine.events()
        readers += [reader] if holds else []
        for number, _ in enumerate(reader):
            if number == 2:
                break
    for name, outcome in finish(engine).items():
        for path, pair in outcome.adapter.items():
            assert all(x.equal(y) for x, y in zip(pair, expected[name].adapter[path], strict=True)), name


@pytest.mark.parametrize("number", chosen(range(6, 40, 6), 1, 4))
def test_commands_when_a_microbatch_is_under_way_then_no_bit_changes(expected, number):
    engine = Engine(Ahead(), capacity=48)
    submit(engine, *jobs(), small_job("e", 4, max_steps=500))
    for index, _ in enumerate(engine.events()):
        if index == number:
            engine.pause("a")
            engine.resume("a")
            engine.pause("b")
            engine.cancel("e")
        if index == number + 5:
            engine.stop()
    for name in "abcd":
        engine.resume(name)
    outcomes = finish(engine)
    for name in "abcd":
        assert outcomes[name].state == "succeeded"
        for path, pair in outcomes[name].adapter.items():
            assert all(x.equal(y) for x, y in zip(pair, expected[name].adapter[path], strict=True)), name


@pytest.mark.parametrize("size", [1, 7], ids=["the last microbatch", "an earlier one"])
def test_step_when_a_loss_is_not_finite_then_is_left_out_and_neighbours_unharmed(expected, size):
    """In the last one only the device knows when the step is due, in an earlier one the host; gradients are
    finite in both."""
    backbone = Ahead()
    engine = Engine(backbone, capacity=48)
    submit(engine, *jobs(), small_job("bad", 9, global_batch_size=size))
    launch = backbone.launch
    spoilt: set[int] = set()

    def infinite(batch: PackedBatch, row_tile: int | None) -> PendingScores:
        running, bad = launch(batch, row_tile), engine.jobs["bad"]
        bad_slot = engine.executor.jobs["bad"].weights.slot
        owned = list(zip(batch.counts, batch.segment_slots, strict=True))
        rows = torch.cat([torch.full((count,), slot == bad_slot) for count, slot in owned])
        results_2N = running._results_2N.clone()
        if bad.step == 2 and bad.step not in spoilt and rows.any():
            spoilt.add(bad.step)
            results_2N[0, rows] = math.inf
        return PendingScores(LossPass(results_2N, None), batch, DeviceEvent(backbone.device))

    backbone.launch = infinite  # type: ignore[method-assign]
    seen: list[Event] = []
    outcomes = finish(engine, lambda _, event: seen.append(event))
    for name in "abcd":
        assert_same_bits(outcomes[name], expected[name])
    steps = [event for event in seen if isinstance(event, StepDone) and event.job == "bad"]
    assert [event.skipped for event in steps] == [not math.isfinite(event.loss) for event in steps]
    assert sum(event.skipped for event in steps) == 1 and all(math.isfinite(event.grad_norm) for event in steps)


def test_run_when_memory_ends_as_steps_are_begun_then_their_global_batches_run_again(expected, monkeypatch):
    """Their microbatch has run and has not been counted."""
    real, calls = step_module.take_steps, []

    def begin(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 4:
            raise torch.OutOfMemoryError("no room for moments")
        return real(*given)

    monkeypatch.setattr(step_module, "take_steps", begin)
    for name, outcome in train(Ahead(), jobs(), capacity=48).items():
        assert_same_bits(outcome, expected[name])


def test_engine_when_interrupted_within_a_step_then_reports_that_it_is_no_longer_exact():
    backbone = Ahead()
    engine = Engine(backbone, capacity=48)
    submit(engine, *jobs())
    launch, calls = backbone.launch, []

    def interrupted(*given: Any) -> PendingScores:
        calls.append(given)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return launch(*given)

    backbone.launch = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    with pytest.raises(JobError, match="interrupted in the middle of a step"):
        engine.run()


def test_reader_when_it_forgets_a_job_whose_step_is_not_reported_yet_then_the_others_go_on():
    """An evaluation that has no memory fails the job with the long sample; its step is reported after that."""
    backbone = Ahead()
    engine = Engine(backbone, capacity=48)
    short, long = random_data(6, lengths=(3, 10)), random_data(5, num_samples=1, lengths=(48, 49))
    mixed = JobData(dataset([*short.train.samples, *long.train.samples]), None)
    one = {"global_batch_size": 1, "max_steps": 6}
    submit(
        engine,
        (job_spec("x", seed=3, eval_data=2, eval_steps=1, **one), random_data(3, num_eval=2, lengths=(3, 10))),
        (job_spec("y", seed=6, max_length=48, **one), mixed),
    )
    failed = []
    for event in engine.events():
        if isinstance(event, MicrobatchDone) and event.jobs == ("x", "y"):
            backbone.eval_room = 1
        if isinstance(event, JobFailed):
            failed.append(event.job)
            engine.forget(event.job)
    assert failed == ["y"] and engine.jobs["x"].state is JobState.SUCCEEDED


def test_evaluation_when_a_microbatch_is_under_way_then_it_is_started_behind_it(monkeypatch):
    """The device goes on with it at once; the engine does not wait for the microbatch before."""
    log: list[str] = []
    look = Ahead.look
    monkeypatch.setattr(Ahead, "look", lambda self, *given: log.append("eval") or look(self, *given))
    backbone = Ahead()
    backbone.log = log
    train(backbone, jobs(), capacity=48)
    assert log.count("eval") >= 4
    before = [log[:index] for index, what in enumerate(log) if what == "eval"]
    assert any(sofar.count("start") > sofar.count("look") for sofar in before)


def test_sound_when_losses_are_not_finite_then_only_their_owners_are_notified():
    losses = torch.tensor([1.0, math.nan, 2.0, math.inf, 3.0, 4.0])
    samples = [Sample(np.arange(count + 1), np.ones(count + 1, dtype=bool)) for count in (1, 1, 1, 1, 2)]
    batch = pack_samples([SlotSample(sample) for sample in samples], None, torch.device("cpu"))
    running = PendingScores(LossPass(torch.stack([losses, losses]), None), batch, DeviceEvent(batch.device))
    assert running.finite([0, 1, 0, -1, 2], 3).tolist() == [1.0, 0.0, 1.0]
    assert running.finite([-1, 0, 1, 0, 1], 2).tolist() == [0.0, 1.0]


@pytest.mark.parametrize(("first", "how"), each_value([3, 7, 4], ["alone", "with a command"]))
def test_run_when_memory_ends_while_a_microbatch_is_started_ahead_then_what_was_written_is_forgotten(
    expected, first, how
):
    """What had been started before is counted, also where something else is decided before it is tried again."""
    commands, backbone, seen = how != "alone", Ahead(), []
    engine = Engine(backbone, capacity=48)
    submit(engine, *jobs())
    for event in engine.events():
        seen.append(event)
        number = sum(isinstance(event, MicrobatchDone) for event in seen)
        if number == first and isinstance(event, MicrobatchDone):
            backbone.room = 20
        if commands and number == first + 1 and isinstance(event, MicrobatchDone):
            engine.pause("c")
            engine.resume("c")
    assert backbone.room == 10**6
    assert engine.limits.capacity == (48 if commands else 24)
    for name in engine.jobs:
        for path, pair in engine.executor.adapter_of(name).items():
            assert all(x.equal(y) for x, y in zip(pair, expected[name].adapter[path], strict=True)), name
    assert not taken_slots(backbone)


def test_evaluation_when_memory_ends_while_a_microbatch_is_under_way_then_is_done_again(expected):
    """The job goes back to its step, so what runs of its next global batch does not count."""
    backbone = Ahead()
    engine = Engine(backbone, capacity=48)
    submit(engine, *jobs())
    seen: list[Event] = []

    def watch(_: Engine, event: Event) -> None:
        seen.append(event)
        if isinstance(event, StepDone) and event.job == "d" and event.step == 4:
            backbone.eval_room = 1

    outcomes = finish(engine, watch)
    assert sum(isinstance(event, JobWarning) for event in seen) == 1
    assert [event.step for event in seen if isinstance(event, EvalDone)] == [2, 4, 6, 8, 9]
    for name, outcome in outcomes.items():
        assert_same_bits(outcome, expected[name])


def test_job_when_it_fails_while_its_next_samples_run_then_neighbours_and_its_slot_are_unharmed(expected):
    backbone = Ahead()
    engine = Engine(backbone, capacity=48)
    submit(engine, *jobs(), small_job("bad", 9, learning_rate=1e18))
    seen: list[Event] = []
    outcomes = finish(engine, lambda _, event: seen.append(event))
    assert [event.job for event in seen if isinstance(event, JobFailed)] == ["bad"]
    assert outcomes["bad"].state == JobState.FAILED
    for name in "abcd":
        assert_same_bits(outcomes[name], expected[name])
    assert not taken_slots(backbone)
