"""What the host does while the GPU works changes when things happen, never what comes out."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from covering import chosen
from tiny_models import (
    assert_same_bits,
    finish,
    job_spec,
    random_data,
    random_model,
    shallow_backbone,
    small_job,
    submit,
    train,
)

from weft.engine import lookahead
from weft.engine.engine import Engine
from weft.engine.events import Event, JobWarning, StepDone
from weft.engine.execute import local
from weft.engine.jobs.live_job import LiveJob
from weft.engine.timeline import TimelineRecorder
from weft.errors import PlanError
from weft.model.backbone import Backbone
from weft.model.packed import PackedBatch
from weft.objectives.objective import Score
from weft.plan.cost.fit import Fit, MicrobatchLoad
from weft.plan.pack import pack, planner_named
from weft.plan.pack.planners import ExactPlanner
from weft.plan.program import Program, Turn
from weft.plan.types import Batch, JobQueue, Limits, Microbatch, Segment


class Late(Backbone):
    """A backbone that computes only when its scores are requested, as a GPU may; logs the calls in order."""

    def __init__(self) -> None:
        super().__init__(random_model("llama_odd", num_hidden_layers=1), SimpleNamespace(eos_token_id=None), "late")
        self.log: list[tuple[str, int]] = []
        self.ids: dict[int, int] = {}

    def launch(self, batch: PackedBatch, row_tile: int | None) -> Any:
        number, begun_s = self.ids.setdefault(id(batch), len(self.ids)), time.perf_counter()
        self.log.append(("launch", number))

        def scores() -> list[Score]:
            self.log.append(("scores", number))
            return super(Late, self).launch(batch, row_tile).scores()

        return SimpleNamespace(
            scores=scores, seconds=lambda _: time.perf_counter() - begun_s, wait=time.perf_counter, batch=batch
        )


def jobs() -> list[Any]:
    return [small_job("a"), small_job("b", 1, max_steps=12, global_batch_size=7), small_job("c", 2)]


@pytest.fixture(scope="module")
def expected():
    return train(shallow_backbone("llama_odd"), jobs(), capacity=48)


def test_microbatch_when_it_runs_then_the_next_is_already_packed(expected, monkeypatch):
    """The next one is packed between launch and scores, also where a step comes in between."""
    backbone, log = Late(), []
    backbone.log = log
    packed = local.pack_microbatch

    def prepare(*given: Any) -> PackedBatch:
        log.append(("prepare", 0))
        return packed(*given)

    monkeypatch.setattr(local, "pack_microbatch", prepare)
    engine = Engine(backbone, capacity=48)
    submit(engine, *jobs())
    outcomes = finish(engine)
    for name, outcome in outcomes.items():
        assert_same_bits(outcome, expected[name])
    kinds = [kind for kind, _ in log]
    early = sum(kinds[i - 1 : i + 2] == ["launch", "prepare", "scores"] for i in range(1, len(kinds)))
    # A job's end cuts a program short, so the one packed for it is dropped.
    assert 0 <= kinds.count("prepare") - kinds.count("launch") <= len(outcomes)
    assert early > kinds.count("launch") // 2


@pytest.mark.parametrize("number", chosen((4, 14, 24), 1))
def test_commands_when_a_microbatch_is_already_packed_then_it_is_dropped_and_no_bit_changes(expected, number):
    """Pausing, cancelling and stopping between any two events loses nothing and repeats nothing."""
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


@pytest.mark.parametrize("works_on", [False, True], ids=["waits", "works on"])
def test_planner_when_nothing_unforeseen_happens_then_is_called_once_per_program(monkeypatch, works_on):
    """The program made while the one before it runs is the one that runs next, also where a job ends and where a
    microbatch is started ahead."""
    monkeypatch.setattr(Backbone, "works_on", works_on)
    calls: list[list[JobQueue]] = []

    def planner(queues: Sequence[JobQueue], limits: Limits) -> Program:
        calls.append(list(queues))
        return pack(queues, limits)

    plans: list[Program] = []
    engine = Engine(shallow_backbone("llama_odd"), capacity=48, planner=planner)
    made = engine._plans.program
    engine._plans.program = lambda queues, limits: plans.append(made(queues, limits)) or plans[-1]
    submit(engine, small_job("a", max_steps=40), small_job("b", 1, max_steps=33))
    engine.run()
    assert len(plans) > 4
    assert len(calls) == len(plans)


def test_program_when_made_ahead_for_other_queues_then_not_used():
    plans = lookahead.LookaheadPlanner(pack, TimelineRecorder())
    spec, data = small_job("a")
    job = LiveJob(spec, data)
    queue, limits = job.queue(), Limits(48)
    plans.foresee([queue], limits)
    foreseen = plans.program([queue], limits)
    assert plans.program([queue], limits) is not foreseen, "it is used once"
    for queues, other in (([job.queue_after(foreseen.turns[:2])], limits), ([queue], Limits(40))):
        plans.foresee([queue], limits)
        assert plans.program(queues, other) == pack(queues, other)


NEEDS_A_SEARCH = [JobQueue("a", (Batch(0, 0, (7,)),), True), JobQueue("b", (Batch(0, 0, (9, 3)),), True)]
"""Greedy needs three microbatches of 10, a search finds two."""


@dataclass(frozen=True)
class Slow(ExactPlanner):
    """A planner that does not answer while training goes on."""

    may_answer: threading.Event = field(default_factory=threading.Event)

    def __call__(self, queues: Sequence[JobQueue], limits: Limits) -> Program:
        # Without a budget it is called for the greedy plan.
        assert not self.budget_s or self.may_answer.wait(600)
        return super().__call__(queues, limits)


def test_steps_when_the_planner_is_slow_then_they_do_not_wait_for_it(expected):
    """Every program that is not there in time is packed greedily; no result changes."""
    planner = Slow(300, 1.5)
    engine = Engine(shallow_backbone("llama_odd"), capacity=48, planner=planner)
    submit(engine, *jobs())
    # All of it is trained before the planner has answered once.
    outcomes = finish(engine)
    planner.may_answer.set()
    for name, outcome in outcomes.items():
        assert_same_bits(outcome, expected[name])
    assert len([span for span in engine.timeline.spans if span.name == "plan"]) > 3
    assert engine._plans._ahead is not None, "it was called, and is still planning or too late"


@dataclass(frozen=True)
class Wrong(ExactPlanner):
    """Runs the last microbatch first, or fails."""

    fails: bool = False

    def __call__(self, queues: Sequence[JobQueue], limits: Limits) -> Program:
        if self.fails:
            raise ZeroDivisionError("nothing to divide by")
        return Program.from_turns(pack(queues, limits).turns[::-1])

    def within(self, budget_s: float) -> ExactPlanner:
        return self


@pytest.mark.parametrize(("fails", "why"), [(True, "nothing to divide by"), (False, "is not the next sample of")])
def test_run_when_the_planner_is_wrong_then_goes_on_with_a_simpler_plan_and_reports_it_once(fails, why, expected):
    engine, warnings = Engine(shallow_backbone("llama_odd"), capacity=48, planner=Wrong(8, 1.0, fails)), list[str]()
    submit(engine, *jobs())
    found = finish(engine, lambda _, event: warnings.append(event.message) if isinstance(event, JobWarning) else None)
    (warning,) = warnings
    assert warning.startswith("a plan was of no use") and why in warning
    for name, outcome in found.items():
        assert_same_bits(outcome, expected[name])


def test_planner_when_it_is_the_users_own_and_wrong_then_the_run_ends_with_what_is_wrong():
    engine = Engine(shallow_backbone(), capacity=48, planner=lambda queues, limits: Program((), ((),)))
    submit(engine, *jobs())
    with pytest.raises(PlanError, match="the program is empty"):
        engine.run()


def test_program_when_not_ready_in_time_then_greedy_and_the_planner_is_called_again_once_it_is():
    may_go, calls = threading.Event(), []

    def planner(queues: Sequence[JobQueue], limits: Limits) -> Program:
        calls.append(list(queues))
        assert may_go.wait(600)
        return planner_named("exact")(queues, limits)

    plans, limits = lookahead.LookaheadPlanner(planner, TimelineRecorder()), Limits(10)
    plans.foresee(NEEDS_A_SEARCH, limits)
    assert plans.program(NEEDS_A_SEARCH, limits) == pack(NEEDS_A_SEARCH, limits)
    plans.foresee(NEEDS_A_SEARCH[:1], limits)
    may_go.set()
    assert plans._ahead is not None
    plans._ahead[1].result(600)
    assert plans.program(NEEDS_A_SEARCH, limits) != pack(NEEDS_A_SEARCH, limits), "late for one, in time for another"
    assert calls == [NEEDS_A_SEARCH], "one plan at a time"
    plans.foresee(NEEDS_A_SEARCH, limits)
    plans._ahead[1].result(600)
    assert len(plans.program(NEEDS_A_SEARCH, limits).microbatches) == 2


def test_program_when_not_foreseen_then_searched_only_as_far_as_its_own_time_allows():
    """A hundredth of nothing known is nothing; of a minute, enough for this search."""
    plans, limits = lookahead.LookaheadPlanner(planner_named("exact"), TimelineRecorder()), Limits(10)
    assert len(plans.program(NEEDS_A_SEARCH, limits).microbatches) == 3
    plans.pace.fit.current = Fit({"fixed": 20.0})
    assert len(plans.program(NEEDS_A_SEARCH, limits).microbatches) == 2
    plans.pace.fit.current = Fit({"fixed": 1e-9})
    assert len(plans.program(NEEDS_A_SEARCH, limits).microbatches) == 3


def test_exact_when_it_plans_ahead_then_fewer_microbatches_and_the_same_bits(monkeypatch):
    """However long a plan takes, here it is waited for, so that the count does not depend on the machine."""
    monkeypatch.setattr(lookahead, "SHORTEST_WAIT_S", 30.0)
    found, counts = {}, {}
    for name in ("greedy", "exact"):
        engine = Engine(shallow_backbone("llama_odd"), capacity=40, planner=planner_named(name))
        submit(engine, *(small_job(f"job{i}", i, max_steps=16, global_batch_size=5) for i in range(3)))
        found[name] = finish(engine)
        spans = [span.name for span in engine.timeline.spans]
        counts[name] = spans.count("forward_backward")
        assert spans.count("plan_ahead") > 2
    assert counts["exact"] < counts["greedy"]
    for job, outcome in found["exact"].items():
        assert_same_bits(outcome, found["greedy"][job])


def test_pace_when_microbatches_have_run_then_the_next_are_predicted_and_the_error_is_known():
    engine = Engine(shallow_backbone("llama_odd"), capacity=48)
    submit(engine, small_job("a", max_steps=60), small_job("b", 1, max_steps=60))
    engine.run()
    runs = [span for span in engine.timeline.spans if span.name == "forward_backward"]
    assert "predicted_s" not in runs[0].args and "predicted_s" in runs[-1].args
    fit = engine._plans.pace.fit
    predicted = [(span.args["predicted_s"], span.duration_s) for span in runs if "predicted_s" in span.args]
    # What was first learnt while a microbatch ran counts for that microbatch's error already.
    assert 0 <= fit.error.count - len(predicted) <= 1
    assert len(runs) > 2 * lookahead.LEARN_EVERY > 0 < fit.error.count
    assert fit.error.mape < 3.0


def test_pace_when_a_microbatch_is_described_then_by_its_jobs_ranks_and_whole_tiles():
    pace = lookahead.MeasuredPace(ranks={"a": 4, "b": 16}, row_tile=8)
    microbatch = Microbatch((Segment("a", 0, 0, 5), Segment("b", 0, 0, 6), Segment("a", 0, 1, 1)))
    assert pace.load(microbatch) == MicrobatchLoad.of([(4, [5, 1]), (16, [6])], 0, 8)
    assert pace.seconds(Program.from_turns([Turn(microbatch)] * 2)) == 0.0
    pace.fit.current = Fit({"rows": 0.5})
    assert pace.seconds(Program.from_turns([Turn(microbatch)] * 2)) == 2 * 0.5 * 16


def test_queue_after_when_the_turns_have_run_then_was_the_queue():
    """What is foreseen is what comes, with global batches that end inside and outside of the program."""
    backbone = shallow_backbone("llama_odd")
    foreseen: list[list[JobQueue]] = []

    class Watched(lookahead.LookaheadPlanner):
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


def test_steps_when_several_are_due_then_taken_together_and_each_reported():
    """One call steps all jobs whose global batches end with one microbatch; an event reports each."""
    engine = Engine(shallow_backbone("llama_odd"), capacity=200)
    submit(engine, *(small_job(f"job{i}", i, global_batch_size=2, max_steps=4) for i in range(4)))
    kinds = [(event.kind, event.job) for event in engine.events() if isinstance(event, StepDone)]
    assert kinds == [("step", f"job{i}") for _ in range(4) for i in range(4)]
    steps = [span for span in engine.timeline.spans if span.name == "step"]
    assert [len(span.args["jobs"]) for span in steps] == [4] * 4


def test_events_when_the_reader_leaves_among_steps_taken_together_then_the_rest_is_reported_later():
    engine = Engine(shallow_backbone("llama_odd"), capacity=200)
    submit(engine, *(small_job(f"job{i}", i, global_batch_size=2, max_steps=3) for i in range(3)))
    received: list[tuple[str, int]] = []
    while any(not job.state.is_final for job in engine.jobs.values()):
        for event in engine.events():
            if isinstance(event, StepDone):
                received.append((event.job, event.step))
                break
    assert sorted(received) == [(f"job{i}", step) for i in range(3) for step in (1, 2, 3)]


def test_timeline_when_the_next_microbatch_is_packed_meanwhile_then_the_span_covers_launch_to_scores():
    engine = Engine(Late(), capacity=48)
    submit(engine, *jobs())
    engine.run()
    spans = sorted(engine.timeline.spans, key=lambda span: span.start_s)
    runs = [span for span in spans if span.name == "forward_backward"]
    inside = [
        span
        for span in spans
        if span.name == "prepare"
        and any(
            r.start_s - 1e-3 <= span.start_s and span.start_s + span.duration_s <= r.start_s + r.duration_s
            for r in runs
        )
    ]
    assert len(inside) > len(runs) // 2
    assert all(a.start_s + a.duration_s <= b.start_s + 1e-3 for a, b in pairwise(runs))
