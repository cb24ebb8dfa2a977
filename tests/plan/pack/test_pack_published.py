"""The published packing keeps its promises, and its solver finds the optimum on small instances."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from round_cases import CAPACITY, fewest_by_force, jobs_to_pack, problems, segments_of, valid_packings

from benchmarks.planning.published import pack_published
from weft.plan.pack import RoundLimits
from weft.plan.pack.bins import min_bins, min_smallest
from weft.plan.types import Batch, JobQueue

LENGTHS = st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=3), min_size=1, max_size=2)
LIMITS = st.builds(RoundLimits, st.just(CAPACITY), st.integers(1, 4), st.sampled_from([1, 4]))


@settings(max_examples=60, deadline=None)
@given(jobs_to_pack(), LIMITS, st.booleans())
def test_pack_published_when_any_jobs_then_every_promise_holds(jobs, limits, is_split):
    names = [q.job for q in jobs]
    groups = [names[::2], names[1::2]] if is_split and len(names) > 1 else None
    assert problems(pack_published(jobs, limits, groups=groups), jobs) == []


@settings(max_examples=15, deadline=None)
@given(LENGTHS, st.sampled_from([1, 4]))
def test_milp_when_small_then_both_stages_equal_brute_force(lengths, multiple):
    limits = RoundLimits(CAPACITY, 1, multiple)
    segments = segments_of(*lengths)
    best = fewest_by_force(segments, limits)
    assert len(min_bins(segments, limits, len(segments), 20).bins) == best
    emptiest = min_smallest(segments, limits, best, 20).bins
    found = min(min(map(limits.taken, bins)) for bins in valid_packings(segments, limits) if len(bins) == best)
    assert min(map(limits.taken, emptiest)) == found
    if best > 1:
        assert min_bins(segments, limits, best - 1, 20).bound > best - 1


def test_milp_when_two_jobs_are_one_token_too_many_then_needs_two_bins():
    assert len(min_bins(segments_of([13], [12]), RoundLimits(24), 2, 20).bins) == 2
    assert len(min_bins(segments_of([12], [12]), RoundLimits(24), 2, 20).bins) == 1
    assert min_bins(segments_of([13], [12]), RoundLimits(24), 1, 20).bins is None


def test_pack_published_when_solver_has_time_then_betters_greedy():
    """First fit decreasing needs three bins for what fits in two."""
    jobs = [JobQueue("a", (Batch(0, 0, (10, 9, 8, 7, 7, 7)),), True)]
    limits = RoundLimits(24)
    assert pack_published(jobs, limits).num_microbatches == 3
    assert pack_published(jobs, limits, time_limit_s=10).num_microbatches == 2


def test_pack_published_when_the_last_bin_has_room_then_takes_from_the_next_batch():
    """Job a ended early enough, so its next sample moves up; job b's may not."""
    jobs = [
        JobQueue("a", (Batch(0, 0, (24,)), Batch(1, 0, (10,))), True),
        JobQueue("b", (Batch(0, 0, (24, 24, 6)), Batch(1, 0, (11,))), True),
    ]
    plan = pack_published(jobs, RoundLimits(24, 3))
    assert problems(plan, jobs) == []
    together = [{(s.job, s.step) for s in m.segments} for m in plan.stream]
    assert together[3:] == [{("b", 0), ("a", 1)}, set(), {("b", 1)}]


def test_pack_published_when_one_job_is_alone_then_needs_noops():
    jobs = [JobQueue("a", tuple(Batch(b, 0, (24,)) for b in range(3)), True)]
    plan = pack_published(jobs, RoundLimits(24, 4))
    assert len(plan.stream) - plan.num_microbatches == 4
    assert plan.num_microbatches == 3
