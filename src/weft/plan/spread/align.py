"""Brings those into step who share frozen weights: empty microbatches where one of them has none.

Every shard needs the others' slices at every layer, so each runs its next microbatch when all do, an empty one where
it has none: because it is done, or because its next samples wait for a step that somebody else has still to bring
about. Problem: the fewest rounds in which all streams, in their own order, come to their ends; letting everybody run
who can is the best there is, since a microbatch that runs holds nobody up. Rounds are those of all replicas, also of
the ones that share nothing, so that no two wait for each other. O(segments + rounds · replicas).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from weft.plan.layout import copies
from weft.plan.pipeline.stream import StreamBatch
from weft.plan.types import Microbatch

Batches = Callable[[Microbatch], Collection[StreamBatch]]


def align(
    streams: Sequence[Sequence[Microbatch]], shards: Sequence[int], shared: Batches, needs: Batches
) -> list[list[Microbatch]]:
    """The same streams, those of each copy of the frozen weights as long as each other.

    `shared`: the global batches of a microbatch that others have samples of, too; `needs`: those that must have been
    backward everywhere before.
    """
    left = Counter(batch for stream in streams for microbatch in stream for batch in shared(microbatch))
    found: list[list[Microbatch]] = [[] for _ in streams]
    places = [0] * len(streams)
    owners = copies(len(streams), shards)
    while True:
        ready = [
            place < len(stream) and not any(left[batch] for batch in needs(stream[place]))
            for stream, place in zip(streams, places, strict=True)
        ]
        if not any(ready):
            break
        ran: list[Microbatch] = []
        for own in owners:
            for replica in own if any(ready[replica] for replica in own) else ():
                found[replica].append(streams[replica][places[replica]] if ready[replica] else Microbatch(()))
                places[replica] += ready[replica]
                ran.append(found[replica][-1])
        for microbatch in ran:
            left.subtract(shared(microbatch))
    assert places == [len(stream) for stream in streams], "global batches come in the same order everywhere"
    return found
