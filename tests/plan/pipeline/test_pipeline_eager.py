"""Running a pipeline ahead: what each stage does, and when, to the second."""

from __future__ import annotations

import pytest

from weft.errors import PlanError
from weft.plan.pipeline.orders import Clock, Pass, play
from weft.plan.pipeline.stream import slowest_first


def clock(num_stages: int, step_s: float = 0.0, held: int = 1) -> Clock:
    """Forward 1 s, backward 2 s, half a second from stage to stage."""
    each = (1.0,) * num_stages
    return Clock(each, (2.0,) * num_stages, (held,) * num_stages, 0.5, (step_s,) * num_stages)


def test_play_of_one_clock_is_there_and_back() -> None:
    """Transfers lie between the stages, and none on the last."""
    first, last = play([clock(2)], 2, None)
    assert first == [Pass(0, False, 0.0, 1.0), Pass(0, True, 5.0, 7.0)]
    assert last == [Pass(0, False, 1.5, 2.5), Pass(0, True, 2.5, 4.5)]


def test_play_holds_a_stage_while_its_optimizers_step() -> None:
    """What waits for the step starts after it, and so does what does not: the device is busy."""
    for waits_for in ([-1, 0], None):
        (only,) = play([clock(1, step_s=3.0), clock(1)], 1, [1], waits_for)
        assert [p.start_s for p in only] == [0.0, 1.0, 6.0, 7.0]


def test_play_within_a_lead_or_memory_waits_for_a_backward() -> None:
    """Three would fit the stage's time; one at a time is all that is allowed."""
    clocks = [clock(2)] * 3
    free = play(clocks, 2, None)[0]
    assert [p.is_backward for p in free[:3]] == [False, False, False]
    for limited in (play(clocks, 2, [1, 3]), play(clocks, 2, None, None, [1, 2])):
        assert [p.is_backward for p in limited[0]] == [False, True] * 3


def test_play_of_what_fits_nowhere_names_the_stage() -> None:
    with pytest.raises(PlanError, match="stage 1: microbatch 0 keeps 4 bytes until its backward, and the stage has 3"):
        play([clock(2, held=4)], 2, [4, 3])


def test_slowest_first_breaks_ties_by_name() -> None:
    assert slowest_first({("b",): 1.0, ("a",): 1.0, ("c",): 2.0}) == [("c",), ("a",), ("b",)]
