"""Fills microbatches with the samples of several jobs, each job in its own order.

Problem: given the next global batches of every job, choose cut points such that no microbatch exceeds `capacity`, a
job's samples keep their order, and a job's global batch b+1 starts only after its step b. Fill the microbatches, and
share each one fairly between the jobs of one priority.

Method: greedy, one microbatch after another, O(samples + microbatches × jobs log jobs). Priorities take their turn from
the highest down. Within one, every job, who had least first, takes samples up to an equal share of what is free, but at
least one; then whoever still has samples of the same global batch fills the rest. Order is never changed, so every plan
trains the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.plan.lanes import plan_lanes
from weft.plan.program import Program, Step, Turn
from weft.plan.types import JobQueue, Limits, Microbatch, Segment


@dataclass
class _Cursor:
    """How far the packer has come in one job's queue."""

    queue: JobQueue
    served_tokens: int
    batch: int = 0
    sample: int = 0
    taken: list[Segment] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return self.batch == len(self.queue.batches)

    @property
    def taken_tokens(self) -> int:
        return sum(s.length for s in self.taken)

    def next_length(self) -> int | None:
        """Length of the next sample that may join the current microbatch; None past the end of the global batch."""
        if self.is_empty:
            return None
        lengths = self.queue.batches[self.batch].lengths
        return lengths[self.sample] if self.sample < len(lengths) else None

    def take(self) -> None:
        batch = self.queue.batches[self.batch]
        segment = Segment(self.queue.job, batch.step, batch.first + self.sample, batch.lengths[self.sample])
        self.taken.append(segment)
        self.sample += 1
        self.served_tokens += segment.length

    def finish_microbatch(self) -> Step | None:
        """Starts the next microbatch; returns the step that became due, if the global batch is complete."""
        self.taken = []
        if self.is_empty or self.next_length() is not None:
            return None
        step = Step(self.queue.job, self.queue.batches[self.batch].step)
        self.batch, self.sample = self.batch + 1, 0
        return step


def pack(queues: Sequence[JobQueue], limits: Limits) -> Program:
    """The next microbatches and steps; stops where a job's listed batches end but the job does not."""
    return plan_lanes(pack_lane, queues, limits)


def pack_lane(queues: Sequence[JobQueue], limits: Limits) -> Program:
    """The same for jobs of one lane whose samples stand by themselves."""
    cursors = [_Cursor(q, q.served_tokens) for q in queues]
    # A global batch whose samples have all run, but whose step has not, is due at once.
    turns = [Turn(Microbatch(()), _finish(cursors))]
    for _ in range(limits.max_microbatches):
        if all(c.is_empty for c in cursors) or any(c.is_empty and not c.queue.is_all for c in cursors):
            break
        microbatch = _fill(cursors, limits.capacity)
        present = {s.job for s in microbatch.segments}
        turns.append(Turn(microbatch, _finish([c for c in cursors if c.queue.job in present])))
    return Program.from_turns(turns)


def _finish(cursors: list[_Cursor]) -> tuple[Step, ...]:
    """The steps that are due behind a microbatch with samples of these jobs."""
    steps = [c.finish_microbatch() for c in cursors]
    return tuple(step for step in steps if step is not None)


def _fill(cursors: list[_Cursor], capacity: int) -> Microbatch:
    waiting = sorted(
        (c for c in cursors if c.next_length() is not None),
        key=lambda c: (-c.queue.priority, c.served_tokens, c.queue.job),
    )
    free = capacity
    # A job of lower priority gets what those above it leave.
    for _, group in itertools.groupby(waiting, key=lambda c: c.queue.priority):
        free = _serve(list(group), free)
    segments = tuple(s for c in waiting for s in c.taken)
    assert segments, "a sample is longer than the capacity; the engine refuses such jobs"
    return Microbatch(segments)


def _serve(equals: list[_Cursor], free: int) -> int:
    """Lets jobs of one priority take samples, first up to equal shares, then whatever fits; returns what is left."""
    for limit in (free // len(equals), free):
        for cursor in equals:
            while (length := cursor.next_length()) is not None and length <= free:
                if cursor.taken and cursor.taken_tokens + length > limit:
                    break
                cursor.take()
                free -= length
    return free
