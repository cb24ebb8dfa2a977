"""No-ops in a stream of microbatches, where the bubble lemma (`plan/lemma.py`) does not hold by itself.

`with_noops` inserts the fewest empty
microbatches that restore it without changing the order: each goes right before the first microbatch that comes too
early, and any valid extension of the stream has at least as many before that one. O(segments + no-ops).
"""

from __future__ import annotations

from collections.abc import Iterable

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
