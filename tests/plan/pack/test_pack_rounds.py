"""Whatever is to be packed, a round plan loses nothing, keeps its limits, and knows how good it is."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from round_cases import CAPACITY, all_segments, fewest_by_force, jobs_to_pack, problems, segments_of

from benchmarks.planning.published import lemma_violations
from weft.errors import PlanError
from weft.plan.cost.types import LinearCost
from weft.plan.pack import RoundLimits, pack_rounds
from weft.plan.pack.packer import PackingWork
from weft.plan.types import Batch, JobQueue, Microbatch

COST = LinearCost(fixed_s=2.0, token_s=1.0, pair_s=0.01)
LIMITS = st.builds(RoundLimits, st.just(CAPACITY), st.integers(1, 4), st.sampled_from([1, 8]))


def steady(num_jobs: int, num_rounds: int, lengths: tuple[int, ...]) -> list[JobQueue]:
    batches = tuple(Batch(b, 0, lengths) for b in range(num_rounds))
    return [JobQueue(f"job{j}", batches, True) for j in range(num_jobs)]


@settings(max_examples=60, deadline=None)
@given(jobs_to_pack(), LIMITS, st.booleans())
def test_pack_rounds_when_any_jobs_then_every_promise_holds(jobs, limits, keep_order):
    plan = pack_rounds(jobs, limits, cost=COST, keep_order=keep_order)
    assert problems(plan, jobs) == []
    assert plan.keeps_order == keep_order
    assert lemma_violations(plan.stream, limits.lemma_distance) == []


@settings(max_examples=20, deadline=None)
@given(jobs_to_pack(), LIMITS)
def test_pack_rounds_when_called_again_then_returns_the_same(jobs, limits):
    assert pack_rounds(jobs, limits, cost=COST) == pack_rounds(jobs, limits, cost=COST)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, CAPACITY), min_size=1, max_size=6))
def test_pack_rounds_when_one_small_round_then_the_count_is_at_most_one_above_the_optimum(lengths):
    limits = RoundLimits(CAPACITY)
    (only,) = pack_rounds([JobQueue("a", (Batch(0, 0, tuple(lengths)),), True)], limits).rounds
    best = fewest_by_force(segments_of(lengths))
    assert only.fewest <= best <= only.num_microbatches <= best + 1
    assert only.num_microbatches == best or not only.is_fewest


@settings(max_examples=30, deadline=None)
@given(jobs_to_pack(), LIMITS)
def test_pack_rounds_when_any_jobs_then_no_round_beats_its_bound(jobs, limits):
    for r in pack_rounds(jobs, limits, cost=COST).rounds:
        assert r.gap >= -1e-9
        costs = [2 * COST.forward_s([s.length for s in m.segments], 0) for m in r.slots]
        assert r.time_s == pytest.approx(len(costs) * max(costs))


def test_pack_rounds_when_no_window_is_left_then_the_bound_counts_the_microbatches_there_are():
    """Two samples of one token share a microbatch between no-ops, though three stages could have had two."""
    jobs = [JobQueue("a", (Batch(0, 0, (24, 24)), Batch(1, 0, (1, 1))), is_all=False)]
    second = pack_rounds(jobs, RoundLimits(CAPACITY, 3), cost=COST).rounds[1]
    assert (second.num_microbatches, second.fewest, second.gap) == (1, 1, pytest.approx(0.0))


def test_pack_rounds_when_jobs_can_take_turns_then_no_noop_and_no_stage_waits():
    """With four jobs on four stages the next batch of each starts a full pipeline after its last."""
    plan = pack_rounds(steady(4, 6, (5, 6, 7, 3)), RoundLimits(CAPACITY, 4), cost=COST)
    assert all(m.segments for m in plan.stream)
    assert lemma_violations(plan.stream, 4) == []


def test_pack_rounds_when_a_round_is_small_then_has_a_microbatch_for_every_stage():
    plan = pack_rounds(steady(4, 3, (3, 3)), RoundLimits(CAPACITY, 4), cost=COST)
    assert [r.num_microbatches for r in plan.rounds] == [4, 4, 4]
    assert all(r.is_proven for r in plan.rounds)


def test_pack_rounds_when_a_microbatch_costs_much_then_single_stage_uses_the_fewest():
    plan = pack_rounds(steady(2, 1, (6, 6)), RoundLimits(CAPACITY), cost=COST)
    assert [m.num_tokens for m in plan.stream] == [24]


def test_pack_rounds_when_attention_counts_then_one_long_sample_is_not_beside_many_short_ones():
    """In tokens 12 + 12 = 4 · 6, in work the long ones cost more and get fewer neighbours."""
    jobs = [JobQueue("a", (Batch(0, 0, (20, 5, 5, 5, 5, 5)),), True)]
    limits = RoundLimits(30)
    even = pack_rounds(jobs, limits, cost=LinearCost())
    assert sorted(m.num_tokens for m in even.stream) == [20, 25]
    heavy = pack_rounds(jobs, limits, cost=LinearCost(pair_s=1.0))
    assert (20,) in [tuple(s.length for s in m.segments) for m in heavy.stream]


def test_pack_rounds_when_a_job_joins_then_jobs_of_the_last_microbatches_wait():
    """The stages go on without a wait from the microbatches that run before."""
    jobs = steady(3, 6, (5, 6, 7, 3))
    limits = RoundLimits(CAPACITY, 4)
    before = [m for r in pack_rounds(jobs, limits, cost=COST).rounds[:2] for m in r.slots]
    rest = [dataclasses.replace(q, batches=q.batches[2:]) for q in jobs]
    rest.append(JobQueue("late", (Batch(0, 0, (9, 9)),), True))
    after = pack_rounds(rest, limits, cost=COST, behind=before)
    assert problems(after, rest) == []
    assert lemma_violations((*before, *after.stream), 4) == []


def test_round_plan_when_printed_as_json_then_it_is_plain_data():
    plan = pack_rounds(steady(2, 2, (5, 6)), RoundLimits(CAPACITY, 2), cost=COST)
    text = json.loads(json.dumps(dataclasses.asdict(plan)))
    assert text["rounds"][0]["slots"][0]["segments"][0]["job"] == "job0"


def test_problems_when_a_plan_is_broken_then_each_break_is_seen():
    """The checker these tests rely on is not blind."""
    jobs = steady(2, 3, (5, 6, 7))
    plan = pack_rounds(jobs, RoundLimits(CAPACITY, 3), cost=COST, keep_order=True)
    stream = plan.stream
    full = Microbatch(tuple(all_segments(jobs)))
    for broken in (stream[1:], (*stream, stream[0]), (full,), stream[::-1]):
        assert problems(dataclasses.replace(plan, stream=broken), jobs)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: pack_rounds([], RoundLimits(64)), "no job has a sample"),
        (lambda: pack_rounds(steady(1, 1, ()), RoundLimits(64)), "job job0 step 0: holds no sample"),
    ],
)
def test_pack_rounds_when_input_is_wrong_then_reports_what_and_where(make, words):
    with pytest.raises(PlanError, match=words) as raised:
        make()
    assert raised.value.code == "plan_error"


@dataclasses.dataclass(frozen=True)
class Tiled:
    """A device that computes whole tiles of 64 tokens, as the fused step does; nothing at all of no samples."""

    def forward_s(self, lengths, stage):
        return -(-sum(lengths) // 64)

    backward_s = forward_s

    def transfer_s(self, num_tokens):
        return 0.0

    def step_s(self, stage):
        return 0.0

    def held_bytes(self, lengths, stage):
        return sum(lengths)


def test_pack_rounds_when_the_device_computes_whole_tiles_then_small_samples_share_them():
    """A sample of 4 tokens costs a tile alone and next to nothing beside others; one microbatch per stage is plenty."""
    jobs = steady(2, 6, (4,) * 8)
    plan = pack_rounds(jobs, RoundLimits(256, 3), cost=Tiled())
    assert problems(plan, jobs) == []
    assert plan.num_microbatches <= 3 * 6
    work = PackingWork(Tiled(), 3, 256)
    assert work.fixed == pytest.approx(2.0, rel=0.02) and work.sample(4) == pytest.approx(6 / 63)


@given(st.integers(1, CAPACITY), st.floats(0, 10), st.floats(0.1, 10), st.floats(0, 1))
def test_work_when_the_cost_is_a_sum_then_it_is_that_sum(length, fixed_s, token_s, pair_s):
    work = PackingWork(LinearCost(fixed_s=fixed_s, token_s=token_s, pair_s=pair_s), 2, CAPACITY)
    assert work.fixed == pytest.approx(2 * fixed_s, abs=1e-9)
    assert work.sample(length) == pytest.approx(2 * (token_s * length + pair_s * length**2))


def test_pack_rounds_when_rows_are_computed_in_tiles_then_slots_are_cut_where_fewer_rows_stay_empty():
    lengths = np.random.default_rng(3).integers(20, 300, (4, 3, 16)).tolist()
    jobs = [
        JobQueue(f"job{j}", tuple(Batch(b, 0, tuple(batch)) for b, batch in enumerate(own)), True)
        for j, own in enumerate(lengths)
    ]
    tile, found = 256, []
    for row_tile in (1, tile):
        limits = RoundLimits(4 * tile, 4, row_tile=row_tile)
        plan = pack_rounds(jobs, limits, cost=COST, keep_order=True)
        assert not problems(plan, jobs)
        found.append(sum(-m.num_tokens % tile for m in plan.stream))
    assert found[1] < 0.5 * found[0]
