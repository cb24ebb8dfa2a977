"""The bubble lemma is a property that any stream can be checked for."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planning.published import lemma_violations
from weft.plan.types import Microbatch, Segment, lemma_distance


def stream(*microbatches: str) -> list[Microbatch]:
    """`"a0 b1"`: a microbatch with samples of batch 0 of job a and batch 1 of job b."""
    return [Microbatch(tuple(Segment(w[0], int(w[1:]), 0, 1) for w in words.split())) for words in microbatches]


def lemma_holds(microbatches: list[Microbatch], num_stages: int) -> bool:
    """The lemma as it is printed, sample against sample; also between batches further apart."""
    samples = [(k, s) for k, m in enumerate(microbatches) for s in m.segments]
    return all(
        b >= a + max(num_stages - 1, 1)
        for (a, earlier), (b, later) in itertools.product(samples, samples)
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
