"""The bubble lemma (LoRAFusion §5.2): how far apart a job's global batches must lie in a pipeline's stream.

In a pipeline of S stages, if a sample of a job's global batch j is in microbatch k, no sample of its batch j + 1 is in
a microbatch before k + S − 1, since only then the backward of the former is done. A microbatch without segments is a
no-op and counts.

Where a stream does not keep that distance by itself, `with_empty_slots` inserts the fewest no-ops that restore it
without changing the order: each goes right before the first microbatch that comes too early, and any valid extension
of the stream has at least as many before that one. O(segments + no-ops).
"""

from __future__ import annotations

from collections.abc import Iterable

from weft.errors import PlanError
from weft.plan.types import Microbatch

NOOP = Microbatch(())


def lemma_distance(num_stages: int) -> int:
    """Microbatches from the last of a job's global batch to the first of its next: stages − 1, and at least 1."""
    if num_stages < 1:
        raise PlanError(f"num_stages is {num_stages}; use at least 1.")
    return max(num_stages - 1, 1)


def with_empty_slots(microbatches: Iterable[Microbatch], distance: int) -> tuple[Microbatch, ...]:
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
