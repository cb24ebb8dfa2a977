"""The bubble lemma on a stream of microbatches, and no-ops where it does not hold by itself.

Lemma (seed 004 §5.2): in a pipeline of S stages, if a job's global batch has a sample in microbatch k, its next global
batch has none before microbatch k + distance; published distance S − 1. `with_noops` inserts the fewest empty
microbatches that restore it without changing the order: each goes right before the first microbatch that comes too
early, and any valid extension of the stream has at least as many before that one. O(segments + no-ops).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from weft.plan.types import Microbatch

NOOP = Microbatch(())


def with_noops(microbatches: Iterable[Microbatch], distance: int) -> tuple[Microbatch, ...]:
    """The same stream, with as many empty microbatches as the distance asks for; none at its ends."""
    stream: list[Microbatch] = []
    last: dict[str, tuple[int, int]] = {}
    previous: dict[str, int] = {}
    for microbatch in microbatches:
        if not stream and not microbatch.segments:
            continue
        earliest = len(stream)
        for s in microbatch.segments:
            step, _ = last.get(s.job, (s.step, 0))
            # `previous` is where the batch before the current one of this job ended.
            ended = last[s.job][1] if s.job in last and s.step > step else previous.get(s.job, -distance)
            earliest = max(earliest, ended + distance)
        stream.extend([NOOP] * (earliest - len(stream)))
        for s in microbatch.segments:
            if s.job in last and s.step > last[s.job][0]:
                previous[s.job] = last[s.job][1]
            last[s.job] = (s.step, len(stream))
        stream.append(microbatch)
    while stream and not stream[-1].segments:
        stream.pop()
    return tuple(stream)


def too_early(stream: Sequence[Microbatch], distance: int) -> list[str]:
    """Where a job's next global batch comes too early; empty if the lemma holds."""
    first: dict[tuple[str, int], int] = {}
    last: dict[tuple[str, int], int] = {}
    for place, microbatch in enumerate(stream):
        for s in microbatch.segments:
            first.setdefault((s.job, s.step), place)
            last[s.job, s.step] = place
    steps: dict[str, list[int]] = {}
    for job, step in first:
        steps.setdefault(job, []).append(step)
    problems = []
    for job, own in steps.items():
        own.sort()
        for before, after in pairwise(own):
            if first[job, after] < last[job, before] + distance:
                problems.append(
                    f"microbatch {first[job, after]}: step {after} of {job} begins, step {before} ended at "
                    f"{last[job, before]}; at least {distance} must lie between"
                )
    return problems
