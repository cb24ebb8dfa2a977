"""Streams of microbatches for property tests: several jobs, each with a few global batches in their order."""

from __future__ import annotations

from hypothesis import strategies as st

from weft.plan.pipeline.build import Schedule
from weft.plan.types import Microbatch, Segment

ONE_OWNER = (Schedule.LORAPP,)
"""Schedules that take microbatches of one global batch alone."""
ONE_ROUND = (Schedule.TEMPLATE,)


@st.composite
def streams(draw: st.DrawFn, schedule: Schedule = Schedule.EAGER) -> list[Microbatch]:
    """Whole global batches of one to three jobs; a microbatch holds one piece, or one of each of several jobs."""
    pieces: dict[str, list[list[Segment]]] = {}
    for number in range(draw(st.integers(1, 3))):
        job, queue = f"job{number}", []
        for step in range(draw(st.integers(1, 3))):
            sizes = draw(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=2), min_size=1, max_size=3))
            index = 0
            for size in sizes:
                queue.append([Segment(job, step + 5, index + i, n) for i, n in enumerate(size)])
                index += len(size)
        pieces[job] = queue
    stream: list[Microbatch] = []
    while pieces:
        takers = [draw(st.sampled_from(sorted(pieces)))]
        if schedule not in ONE_OWNER and draw(st.booleans()):
            rounds = {pieces[job][0][0].step for job in takers}
            may_join = [j for j in sorted(pieces) if schedule not in ONE_ROUND or pieces[j][0][0].step in rounds]
            takers = sorted({*takers, draw(st.sampled_from(may_join))})
        stream.append(Microbatch(tuple(s for job in takers for s in pieces[job].pop(0))))
        pieces = {job: queue for job, queue in pieces.items() if queue}
    return stream
