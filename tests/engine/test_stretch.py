"""What the host does while the GPU works changes when things happen, never what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_models import (
    assert_same_bits,
    finish,
    job_spec,
    random_backbone,
    random_data,
    random_model,
    small_job,
    submit,
    train,
)

from weft.backbone.backbone import Backbone
from weft.backbone.packed import PackedBatch
from weft.engine import stretch
from weft.engine.engine import Engine
from weft.engine.events import Event, StepDone
from weft.engine.live_job import LiveJob
from weft.engine.timeline import Timeline
from weft.plan.pack import pack
from weft.plan.types import JobQueue, Limits, Program


class Late(Backbone):
    """A backbone that computes only when its losses are asked for, as a GPU may; notes what was asked when."""

    def __init__(self) -> None:
        super().__init__(random_model("llama_odd"), SimpleNamespace(eos_token_id=None), "late")
        self.log: list[tuple[str, int]] = []
        self.ids: dict[int, int] = {}

    def launch(self, batch: PackedBatch, row_tile: int | None) -> Any:
        number = self.ids.setdefault(id(batch), len(self.ids))
        self.log.append(("launch", number))

        def losses() -> list[float]:
            self.log.append(("losses", number))
            return super(Late, self).launch(batch, row_tile).losses()

        return SimpleNamespace(losses=losses, batch=batch)


def jobs() -> list[Any]:
    return [small_job("a"), small_job("b", 1, max_steps=12, global_batch_size=7), small_job("c", 2)]


@pytest.fixture
def expected():
    return train(random_backbone("llama_odd"), jobs(), capacity=48)


def test_microbatch_when_it_runs_then_the_next_is_already_packed(expected, monkeypatch):
    """The next one is packed between launch and losses, also where a step comes in between."""
    backbone, log = Late(), []
    backbone.log = log
    packed = stretch.prepare

    def prepare(*given: Any) -> PackedBatch:
        log.append(("prepare", 0))
        return packed(*given)

    monkeypatch.setattr(stretch, "prepare", prepare)
    engine = Engine(backbone, capacity=48)
    submit(engine, *jobs())
    outcomes = finish(engine)
    for name, outcome in outcomes.items():
        assert_same_bits(outcome, expected[name])
    kinds = [kind for kind, _ in log]
    early = sum(kinds[i - 1 : i + 2] == ["launch", "prepare", "losses"] for i in range(1, len(kinds)))
    # A job's end cuts a program short, so the one packed for it is dropped.
    assert 0 <= kinds.count("prepare") - kinds.count("launch") <= len(outcomes)
    assert early > kinds.count("launch") // 2


def test_commands_when_a_microbatch_is_already_packed_then_it_is_dropped_and_no_bit_changes(expected):
    """Pausing, cancelling and stopping between any two events loses nothing and repeats nothing."""
    for number in range(4, 30, 10):
        engine = Engine(Late(), capacity=48)
        submit(engine, *jobs(), small_job("d", 3, max_steps=500))
        seen: list[Event] = []
        for event in engine.events():
            seen.append(event)
            if len(seen) == number:
                engine.pause("a")
                engine.cancel("d")
            if len(seen) == number + 4:
                engine.stop()
        for name in "abc":
            engine.resume(name)
        outcomes = finish(engine)
        for name in "abc":
            assert outcomes[name].state == "succeeded"
            for path, pair in outcomes[name].adapter.items():
                assert all(x.equal(y) for x, y in zip(pair, expected[name].adapter[path], strict=True))


def test_planner_when_nothing_unforeseen_happens_then_is_asked_once_per_program():
    """The program made during the last microbatch is the one that runs next."""
    asked: list[list[JobQueue]] = []

    def planner(queues: Sequence[JobQueue], limits: Limits) -> Program:
        asked.append(list(queues))
        return pack(queues, limits)

    plans: list[Program] = []
    engine = Engine(random_backbone("llama_odd"), capacity=48, planner=planner)
    made = engine._plans.program
    engine._plans.program = lambda queues, limits: plans.append(made(queues, limits)) or plans[-1]
    submit(engine, small_job("a", max_steps=40), small_job("b", 1, max_steps=33))
    engine.run()
    assert len(plans) > 4
    assert len(asked) == len(plans)


def test_program_when_made_ahead_for_other_queues_then_not_used():
    plans = stretch.Plans(pack, Timeline())
    spec, data = small_job("a")
    job = LiveJob(spec, data, random_backbone("llama_odd").new_adapter(spec.adapter, 0))
    queue, limits = job.queue(), Limits(48)
    plans.foresee([queue], limits)
    foreseen = plans.program([queue], limits)
    assert plans.program([queue], limits) is not foreseen, "it is used once"
    for queues, other in (([job.queue_after(foreseen.instructions[:3])], limits), ([queue], Limits(40))):
        plans.foresee([queue], limits)
        assert plans.program(queues, other) == pack(queues, other)


def test_queue_after_when_the_instructions_have_run_then_was_the_queue():
    """What is foreseen is what comes, with global batches that end inside and outside of the program."""
    backbone = random_backbone("llama_odd")
    foreseen: list[list[JobQueue]] = []

    class Watched(stretch.Plans):
        def program(self, queues: list[JobQueue], limits: Limits) -> Program:
            if foreseen:
                assert foreseen.pop() == queues
            return super().program(queues, limits)

        def foresee(self, queues: list[JobQueue], limits: Limits) -> None:
            foreseen.append(queues)
            super().foresee(queues, limits)

    engine = Engine(backbone, capacity=40)
    engine._plans = Watched(pack, engine.timeline)
    big = (job_spec("big", global_batch_size=30, max_steps=3), random_data(4, num_samples=30))
    submit(engine, big, small_job("a", max_steps=30))
    engine.run()
    assert engine.timeline.spans


def test_steps_when_several_are_due_then_taken_together_and_each_settled():
    """One call steps all jobs whose global batches end with one microbatch; everybody is told of each."""
    engine = Engine(random_backbone("llama_odd"), capacity=200)
    submit(engine, *(small_job(f"job{i}", i, global_batch_size=2, max_steps=4) for i in range(4)))
    kinds = [(event.kind, event.job) for event in engine.events() if isinstance(event, StepDone)]
    assert kinds == [("step", f"job{i}") for _ in range(4) for i in range(4)]
    steps = [span for span in engine.timeline.spans if span.name == "step"]
    assert [len(span.args["jobs"]) for span in steps] == [4] * 4


def test_events_when_the_reader_leaves_among_steps_taken_together_then_the_rest_is_told_later():
    engine = Engine(random_backbone("llama_odd"), capacity=200)
    submit(engine, *(small_job(f"job{i}", i, global_batch_size=2, max_steps=3) for i in range(3)))
    told: list[tuple[str, int]] = []
    while any(not job.state.is_final for job in engine.jobs.values()):
        for event in engine.events():
            if isinstance(event, StepDone):
                told.append((event.job, event.step))
                break
    assert sorted(told) == [(f"job{i}", step) for i in range(3) for step in (1, 2, 3)]


def test_timeline_when_the_next_microbatch_is_packed_meanwhile_then_the_span_covers_launch_to_losses():
    engine = Engine(Late(), capacity=48)
    submit(engine, *jobs())
    engine.run()
    spans = sorted(engine.timeline.spans, key=lambda span: span.start_s)
    runs = [span for span in spans if span.name == "forward_backward"]
    inside = [
        span
        for span in spans
        if span.name == "prepare"
        and any(r.start_s <= span.start_s and span.start_s + span.duration_s <= r.start_s + r.duration_s for r in runs)
    ]
    assert len(inside) > len(runs) // 2
    assert all(a.start_s + a.duration_s <= b.start_s for a, b in pairwise(runs))
