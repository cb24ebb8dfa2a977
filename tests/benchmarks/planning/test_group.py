"""Groups balance tokens, and the bubble lemma is a property that any stream can be checked for."""

from __future__ import annotations

import itertools
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planning.published import JobLengths, deal_head_tail, group_jobs, lemma_violations
from weft.errors import PlanError
from weft.plan.types import Microbatch, Segment, lemma_distance

jobs_lists = st.lists(st.tuples(st.integers(1, 3000).map(float), st.integers(1, 64)), min_size=1, max_size=12).map(
    lambda rows: [JobLengths(f"job{i:02d}", mean, size) for i, (mean, size) in enumerate(rows)]
)


def stream(*microbatches: str) -> list[Microbatch]:
    """`"a0 b1"`: a microbatch with samples of batch 0 of job a and batch 1 of job b."""
    return [Microbatch(tuple(Segment(w[0], int(w[1:]), 0, 1) for w in words.split())) for words in microbatches]


@settings(max_examples=100, deadline=None)
@given(jobs_lists, st.data())
def test_group_jobs_any_jobs_covers_each_once_and_is_never_less_even_than_pairing(
    jobs: list[JobLengths], data: st.DataObject
) -> None:
    """Every job is in one group, none is empty; the sums are right and at least as even as head-tail pairing's."""
    num_groups = data.draw(st.integers(1, len(jobs)))
    result = group_jobs(jobs, num_groups)
    assert sorted(j for g in result.groups for j in g) == sorted(j.job for j in jobs)
    assert len(result.groups) == num_groups and all(result.groups)
    tokens = {j.job: j.batch_tokens for j in jobs}
    assert result.batch_tokens == pytest.approx([sum(tokens[j] for j in g) for g in result.groups])
    ordered = sorted(jobs, key=lambda j: (j.mean_length, j.job))
    paired = [0.0] * num_groups
    for job, group in zip(ordered, deal_head_tail(len(jobs), num_groups), strict=True):
        paired[group] += job.batch_tokens
    assert statistics.pvariance(result.batch_tokens) <= statistics.pvariance(paired) * (1 + 1e-9) + 1e-9
    assert group_jobs(jobs[::-1], num_groups) == result


def test_group_jobs_four_data_sets_pairs_head_with_tail() -> None:
    """The shortest job meets the longest, the two in the middle each other."""
    means = {"xsum": 526.0, "cnn": 947.0, "wiki": 1800.0, "mixed": 1091.0}
    result = group_jobs([JobLengths(job, mean, 16) for job, mean in means.items()], 2)
    assert [set(g) for g in result.groups] == [{"xsum", "wiki"}, {"cnn", "mixed"}]


def test_group_jobs_skewed_lengths_are_evened_beyond_pairing() -> None:
    """One giant job: pairing would add a short one to it, the answer leaves it alone."""
    jobs = [JobLengths(f"job{i}", mean, 1) for i, mean in enumerate([10.0, 20.0, 30.0, 900.0])]
    assert group_jobs(jobs, 2).groups == (("job3",), ("job0", "job1", "job2"))


def lemma_holds(microbatches: list[Microbatch], num_stages: int) -> bool:
    """The lemma as it is printed, sample against sample; also between batches further apart."""
    placed = [(k, s) for k, m in enumerate(microbatches) for s in m.segments]
    return all(
        b >= a + max(num_stages - 1, 1)
        for (a, earlier), (b, later) in itertools.product(placed, placed)
        if earlier.job == later.job and earlier.step < later.step
    )


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(["a0", "a1", "a2", "b0", "b1"]), max_size=2).map(" ".join), max_size=8),
    st.integers(1, 4),
)
def test_bubble_lemma_any_stream_agrees_with_the_printed_lemma(words: list[str], num_stages: int) -> None:
    """No violation is found exactly where every pair of samples keeps the distance."""
    assert (not lemma_violations(stream(*words), lemma_distance(num_stages))) == lemma_holds(stream(*words), num_stages)


def test_bubble_lemma_names_microbatch_job_and_distance() -> None:
    """Four stages need three microbatches; a no-op counts as one."""
    assert not lemma_violations(stream("a0", "b0", "", "a1"), lemma_distance(4))
    assert lemma_violations(stream("a0", "b0", "a1"), lemma_distance(4)) == [
        "microbatch 2: step 1 of a comes 2 after the one before it; at least 3 are needed"
    ]
    assert lemma_violations(stream("a1", "a0"), lemma_distance(2)) == [
        "microbatch 1: step 0 of a comes after its step 1 has begun"
    ]
    assert lemma_violations(stream("a0 a1"), lemma_distance(1))


def test_group_bad_input_raises_plan_error() -> None:
    """No jobs, a name twice, no samples, too many groups, no stage."""
    job = JobLengths("a", 10.0, 2)
    with pytest.raises(PlanError, match="no jobs"):
        group_jobs([], 1)
    with pytest.raises(PlanError, match="same name"):
        group_jobs([job, job], 1)
    with pytest.raises(PlanError, match="a: mean length is 0"):
        group_jobs([JobLengths("a", 0.0, 2)], 1)
    with pytest.raises(PlanError, match="1 jobs cannot form 2 groups"):
        group_jobs([job], 2)
    with pytest.raises(PlanError, match="num_stages is 0"):
        lemma_violations([], lemma_distance(0))
