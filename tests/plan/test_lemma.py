"""After no-ops the bubble lemma holds, with as few as possible."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planning.published import lemma_violations
from weft.plan.types import NOOP, Microbatch, Segment, with_empty_slots


@st.composite
def streams(draw: st.DrawFn) -> list[Microbatch]:
    """Jobs in any mixture, each with its steps in order."""
    step = dict.fromkeys("ab", 0)
    made = []
    for _ in range(draw(st.integers(1, 6))):
        segments = []
        for job in draw(st.sets(st.sampled_from("ab"), min_size=1)):
            step[job] += draw(st.integers(0, 1)) if made else 0
            segments.append(Segment(job, step[job], 0, 1))
        made.append(Microbatch(tuple(segments)))
    return made


@given(streams(), st.integers(1, 4))
def test_with_noops_when_any_stream_then_distances_hold_and_order_stays(stream, distance):
    longer = with_empty_slots(stream, distance)
    assert lemma_violations(longer, distance) == []
    assert [m for m in longer if m.segments] == stream


@settings(max_examples=40)
@given(streams(), st.integers(1, 4))
def test_with_noops_when_any_stream_then_no_shorter_one_will_do(stream, distance):
    num = len(with_empty_slots(stream, distance)) - len(stream)
    if 0 < num <= 4:
        for cuts in itertools.combinations_with_replacement(range(1, len(stream)), num - 1):
            trial = [m for i, own in enumerate(stream) for m in [*[NOOP] * cuts.count(i), own]]
            assert lemma_violations(trial, distance)


def test_lemma_violations_when_the_next_batch_is_one_microbatch_early_then_reports_it():
    stream = [Microbatch((Segment("a", step, 0, 1),)) for step in (0, 1)]
    assert lemma_violations(stream, 1) == []
    assert "step 1 of a" in lemma_violations(stream, 2)[0]
    assert lemma_violations([stream[0], NOOP, stream[1]], 2) == []


def test_with_noops_when_empty_slots_stand_at_the_ends_then_they_go():
    own = Microbatch((Segment("a", 0, 0, 1),))
    assert with_empty_slots([NOOP, own, NOOP, own, NOOP], 1) == (own, NOOP, own)
