"""What a stream of microbatches promises about its jobs' global batches.

A stream is microbatches in the order of their forwards. A global batch, (job, step), is open from its first microbatch
to its last; after the last one's backward the job's optimizer steps, and only then may the job's next global batch be
forward. All orders of a pipeline follow from three facts worked out here, in O(segments): which steps a microbatch
completes, which backward a forward waits for, and where a pipeline that knows nothing of other jobs is emptied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.errors import PlanError
from weft.plan.types import Microbatch

StreamBatch = tuple[str, int]
"""Job and step."""


@dataclass(frozen=True, slots=True)
class BatchStream:
    """A stream's global batches; forwards, and backwards, keep its order on every stage."""

    microbatches: tuple[Microbatch, ...]
    members: dict[StreamBatch, tuple[int, ...]]
    """The microbatches that hold samples of a global batch, ascending."""
    waits_for: tuple[int, ...]
    """Per microbatch the last one whose backward, and steps, its forward needs; -1 for none. Always an earlier one."""

    @property
    def completes(self) -> dict[int, list[StreamBatch]]:
        """The global batches whose last microbatch this is."""
        ends: dict[int, list[StreamBatch]] = {}
        for batch in sorted(self.members):
            ends.setdefault(self.members[batch][-1], []).append(batch)
        return ends

    @property
    def flushes(self) -> tuple[int, ...]:
        """Where a classic schedule empties the pipeline: no global batch is open, or a job's next one begins."""
        last = [-1] * len(self.microbatches)
        for places in self.members.values():
            last[places[0]] = max(last[places[0]], places[-1])
        start, reach, found = 0, -1, []
        for place, end in enumerate(last):
            if self.waits_for[place] >= start:
                start = place
                found.append(place)
            reach = max(reach, end)
            if reach <= place:
                start = place + 1
                found.append(place + 1)
        return tuple(dict.fromkeys(found))


def read_stream(microbatches: Sequence[Microbatch]) -> BatchStream:
    """The stream of these microbatches; a PlanError if a job's batch begins before the one before is complete."""
    members: dict[StreamBatch, list[int]] = {}
    for place, microbatch in enumerate(microbatches):
        for batch in dict.fromkeys((s.job, s.step) for s in microbatch.segments):
            members.setdefault(batch, []).append(place)
    waits_for = [-1] * len(microbatches)
    before: dict[str, StreamBatch] = {}
    for batch in sorted(members):
        job, step = batch
        if job in before:
            previous = before[job]
            end, start = members[previous][-1], members[batch][0]
            if start <= end:
                raise PlanError(
                    f"step {step} of {job} has samples in microbatch {start}, and step {previous[1]} in {end}; "
                    "a global batch must be complete in the microbatches before the next one's first."
                )
            for place in members[batch]:
                waits_for[place] = max(waits_for[place], end)
        before[job] = batch
    frozen = {batch: tuple(places) for batch, places in members.items()}
    return BatchStream(tuple(microbatches), frozen, tuple(waits_for))
