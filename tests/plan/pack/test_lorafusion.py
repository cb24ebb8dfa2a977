"""LoRAFusion's packing keeps its promises, and its solver finds the optimum on small instances."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from round_cases import CAPACITY, fewest_by_force, jobs_to_pack, problems, segments_of, valid_packings

from weft.plan.check import violations
from weft.plan.pack import RoundLimits, RoundPlan, lorafusion, pack
from weft.plan.pack.bins import min_bins, min_smallest, taken
from weft.plan.pack.lorafusion import LoraFusionPlanner, pack_groups, pair_head_tail
from weft.plan.program import Step
from weft.plan.simulate.choose import pipeline_planner
from weft.plan.types import Batch, JobQueue, Limits, Segment

LENGTHS = st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=3), min_size=1, max_size=2)


def packed(jobs, limits, *, groups=None, budget_s=0.0, keep_order=False):
    stream = pack_groups(groups or [jobs], limits, budget_s=budget_s, keep_order=keep_order)
    return RoundPlan(limits, (), stream, keep_order)


@settings(max_examples=60, deadline=None)
@given(jobs_to_pack(), st.integers(1, 4), st.booleans(), st.booleans())
def test_pack_groups_when_any_jobs_then_every_promise_holds(jobs, num_stages, is_split, keep_order):
    limits = RoundLimits(CAPACITY, num_stages)
    groups = [jobs[::2], jobs[1::2]] if is_split and len(jobs) > 1 else None
    assert problems(packed(jobs, limits, groups=groups, keep_order=keep_order), jobs) == []


def in_order(bins: list[list[Segment]]) -> bool:
    order: dict[str, list[int]] = {}
    for own in bins:
        for s in sorted(own, key=lambda s: s.index):
            order.setdefault(s.job, []).append(s.index)
    return all(own == sorted(own) for own in order.values())


def ordered_packings(segments):
    """Every packing in every order of its bins that keeps each job's order."""
    for bins in valid_packings(segments):
        yield from (list(own) for own in itertools.permutations(bins) if in_order(list(own)))


@settings(max_examples=15, deadline=None)
@given(LENGTHS)
def test_milp_when_small_then_both_stages_equal_brute_force(lengths):
    segments = segments_of(*lengths)
    best = fewest_by_force(segments)
    assert len(min_bins(segments, CAPACITY, len(segments), 20)) == best
    emptiest = min_smallest(segments, CAPACITY, best, 20)
    found = min(min(map(taken, bins)) for bins in valid_packings(segments) if len(bins) == best)
    assert min(map(taken, emptiest)) == found
    assert best == 1 or min_bins(segments, CAPACITY, best - 1, 20) is None


@settings(max_examples=15, deadline=None)
@given(LENGTHS)
def test_milp_when_order_is_kept_then_both_stages_equal_brute_force(lengths):
    segments = segments_of(*lengths)
    valid = list(ordered_packings(segments))
    best = min(map(len, valid))
    found = min_bins(segments, CAPACITY, len(segments), 20, keep_order=True)
    assert len(found) == best and in_order(found)
    emptiest = min_smallest(segments, CAPACITY, best, 20, keep_order=True)
    assert in_order(emptiest)
    assert taken(emptiest[-1]) == min(taken(bins[-1]) for bins in valid if len(bins) == best)


def test_milp_when_two_jobs_are_one_token_too_many_then_needs_two_bins():
    assert len(min_bins(segments_of([13], [12]), 24, 2, 20)) == 2
    assert len(min_bins(segments_of([12], [12]), 24, 2, 20)) == 1
    assert min_bins(segments_of([13], [12]), 24, 1, 20) is None


def test_pack_groups_when_solver_has_time_then_betters_greedy(monkeypatch):
    """First fit decreasing needs three bins for what fits in two, which the first stage alone finds."""
    monkeypatch.setattr(lorafusion, "min_smallest", lambda *given, **named: None)
    jobs = [JobQueue("a", (Batch(0, 0, (10, 9, 8, 7, 7, 7)),), True)]
    limits = RoundLimits(24)
    assert packed(jobs, limits).num_microbatches == 3
    assert packed(jobs, limits, budget_s=10).num_microbatches == 2


def test_pack_groups_when_solver_has_time_then_the_last_microbatch_is_as_small_as_can_be():
    """In order, greedy gives both jobs an even share, and leaves 22 tokens; all of b's first leaves 18."""
    jobs = [JobQueue("a", (Batch(0, 0, (9, 9)),), True), JobQueue("b", (Batch(0, 0, (8, 8, 5)),), True)]
    greedy, solved = (packed(jobs, RoundLimits(24), budget_s=s, keep_order=True).stream for s in (0.0, 10.0))
    assert [m.num_tokens for m in greedy] == [17, 22]
    assert [m.num_tokens for m in solved] == [21, 18]


def test_pack_groups_when_the_last_bin_has_room_then_takes_from_the_next_batch():
    """Job a ended early enough, so its next sample moves up; job b's may not."""
    jobs = [
        JobQueue("a", (Batch(0, 0, (24,)), Batch(1, 0, (10,))), True),
        JobQueue("b", (Batch(0, 0, (24, 24, 6)), Batch(1, 0, (11,))), True),
    ]
    plan = packed(jobs, RoundLimits(24, 3))
    assert problems(plan, jobs) == []
    together = [{(s.job, s.step) for s in m.segments} for m in plan.stream]
    assert together[3:] == [{("b", 0), ("a", 1)}, set(), {("b", 1)}]


def test_pack_groups_when_order_is_kept_then_merges_only_what_comes_next():
    """The last microbatch has room for the second sample, not for the first."""
    jobs = [
        JobQueue("a", (Batch(0, 0, (24,)), Batch(1, 0, (20, 4))), True),
        JobQueue("b", (Batch(0, 0, (20,)),), True),
    ]
    ordered, free = (packed(jobs, RoundLimits(24), keep_order=kept).stream for kept in (True, False))
    assert ("a", 1) not in {(s.job, s.step) for s in ordered[1].segments}
    assert Segment("a", 1, 1, 4) in free[1].segments


def test_pack_groups_when_one_job_is_alone_then_needs_noops():
    jobs = [JobQueue("a", tuple(Batch(b, 0, (24,)) for b in range(3)), True)]
    plan = packed(jobs, RoundLimits(24, 4))
    assert len(plan.stream) - plan.num_microbatches == 4
    assert plan.num_microbatches == 3


def test_pair_head_tail_when_four_data_sets_then_the_shortest_meets_the_longest():
    means = {"xsum": 526, "cnn": 947, "wiki": 1800, "mixed": 1091}
    jobs = [JobQueue(job, (Batch(0, 0, (mean - 10, mean + 10)),), True) for job, mean in means.items()]
    found = [{queue.job for queue in group} for group in pair_head_tail(jobs, 2)]
    assert found == [{"xsum", "wiki"}, {"cnn", "mixed"}]


@settings(max_examples=40, deadline=None)
@given(jobs_to_pack(), st.integers(1, 12), st.booleans())
def test_planner_when_any_queues_then_valid_on_one_device_and_in_stages(jobs, most, is_free):
    jobs = [dataclasses.replace(q, home=None if is_free else 0) for q in jobs]
    limits = Limits(CAPACITY, most)
    for num_stages in (1, 3):
        planner = LoraFusionPlanner() if num_stages == 1 else pipeline_planner("lorafusion", Stages(num_stages))
        program = planner.within(0.2)(jobs, limits)
        assert violations(program, jobs, limits) == []
        assert program.num_stages == num_stages
        steps = {i for i in program.stages[0] if isinstance(i, Step)}
        assert {(q.job, q.batches[0].step) for q in jobs} <= {(i.job, i.step) for i in steps}


@dataclasses.dataclass
class Stages:
    """All that a pipeline's planner reads of a cost model when its schedule is fixed."""

    num_stages: int


def test_planner_when_all_samples_of_a_batch_have_run_then_the_step_is_due_at_once():
    jobs = [JobQueue("a", (Batch(3, 4, ()),), True), JobQueue("b", (Batch(0, 1, (9,)),), True)]
    program = LoraFusionPlanner()(jobs, Limits(CAPACITY))
    assert violations(program, jobs, Limits(CAPACITY)) == []
    assert program.stages[0][0] == Step("a", 3)
    assert LoraFusionPlanner()(jobs[:1], Limits(CAPACITY)).stages == ((Step("a", 3),),)


def test_planner_when_jobs_have_lanes_groups_or_priorities_then_their_rules_hold():
    limits, own = Limits(CAPACITY), JobQueue("a", (Batch(0, 0, (20, 4, 9)),), True)
    mixed = [own, JobQueue("b", (Batch(0, 0, (4, 9, 5, 6), (2, 2)),), True, lane="other")]
    assert violations(LoraFusionPlanner()(mixed, limits), mixed, limits) == []
    urgent = [own, JobQueue("b", (Batch(0, 0, (4, 9)),), True, priority=1)]
    assert LoraFusionPlanner()(urgent, limits) == pack(urgent, limits)


def test_planner_when_it_has_no_time_then_no_solver_runs(monkeypatch):
    """Where training waits for a plan, it is the greedy one with its merge pass."""
    jobs = [JobQueue("a", (Batch(0, 0, (17,)),), True), JobQueue("b", (Batch(0, 0, (22, 7)),), True)]
    least = LoraFusionPlanner(budget_s=10.0)(jobs, Limits(CAPACITY))
    monkeypatch.setattr(lorafusion, "min_bins", None)
    monkeypatch.setattr(lorafusion, "min_smallest", None)
    quick = LoraFusionPlanner().quick
    assert quick.quick is quick and quick.within(5.0).budget_s == 0
    assert len(quick(jobs, Limits(CAPACITY)).microbatches) > len(least.microbatches)
    with pytest.raises(TypeError):
        LoraFusionPlanner()(jobs, Limits(CAPACITY))


def test_planner_in_stages_when_groups_take_turns_then_no_stage_waits_for_a_step():
    """Two groups of two: between two global batches of a job come those of the other group."""
    lengths = {"a": 11, "b": 12, "c": 12, "d": 13}
    jobs = [JobQueue(job, tuple(Batch(b, 0, (n, n)) for b in range(4)), True) for job, n in lengths.items()]
    planner = pipeline_planner("lorafusion", Stages(3))
    program = planner(jobs, Limits(CAPACITY))
    assert ["".join(sorted(m.job_tokens)) for m in program.microbatches] == ["ad", "ad", "bc", "bc"] * 4
    assert planner.can_be_replaced and planner.quick.packer.budget_s == 0
