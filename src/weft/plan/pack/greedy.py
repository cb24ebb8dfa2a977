"""Fills microbatches with the samples of several jobs, each job in its own order.

Problem: given the next global batches of every job, choose cut points such that no microbatch exceeds `capacity`, a
job's samples keep their order, and a job's global batch b+1 starts only after its step b. Fill the microbatches, and
share each one fairly between the jobs of one priority.

Method: greedy, one microbatch after another, O(samples + microbatches × jobs log jobs). Priorities take their turn from
the highest down. Within one, every job, least served first, takes samples up to an equal share of the free room, but at
least one; then jobs with samples of the same global batch left fill the rest. Order is never changed, so every plan
trains the same bits.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from weft.errors import PlanError
from weft.plan.planner import PlanFunction
from weft.plan.program import Program, Step, Turn
from weft.plan.types import Batch, JobQueue, Limits, Microbatch, Segment


@dataclass
class _Cursor:
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
        """Length of the next sample that may join the microbatch; None past the end of the global batch."""
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
        """Ends the microbatch for this job; returns the step that is due, if the global batch is complete."""
        self.taken = []
        if self.is_empty or self.next_length() is not None:
            return None
        step = Step(self.queue.job, self.queue.batches[self.batch].step)
        self.batch, self.sample = self.batch + 1, 0
        return step


def pack(queues: Sequence[JobQueue], limits: Limits) -> Program:
    return plan_lanes(pack_lane, queues, limits)


def pack_lane(queues: Sequence[JobQueue], limits: Limits) -> Program:
    """`pack` for jobs of one lane without groups of samples."""
    cursors = [_Cursor(q, q.served_tokens) for q in queues]
    # The step of a global batch whose samples have all run is due at once.
    turns = [Turn(Microbatch(()), _finish(cursors))]
    for _ in range(limits.max_microbatches):
        if all(c.is_empty for c in cursors) or any(c.is_empty and not c.queue.is_all for c in cursors):
            break
        microbatch = _fill(cursors, limits.capacity)
        present = {s.job for s in microbatch.segments}
        turns.append(Turn(microbatch, _finish([c for c in cursors if c.queue.job in present])))
    return Program.from_turns(turns)


def _finish(cursors: list[_Cursor]) -> tuple[Step, ...]:
    steps = [c.finish_microbatch() for c in cursors]
    return tuple(step for step in steps if step is not None)


def _fill(cursors: list[_Cursor], capacity: int) -> Microbatch:
    waiting = sorted(
        (c for c in cursors if c.next_length() is not None),
        key=lambda c: (-c.queue.priority, c.served_tokens, c.queue.job),
    )
    free = capacity
    # A job of lower priority gets what higher ones leave.
    for _, group in itertools.groupby(waiting, key=lambda c: c.queue.priority):
        free = _serve(list(group), free)
    segments = tuple(s for c in waiting for s in c.taken)
    assert segments, "a sample is longer than the capacity; the engine refuses such jobs"
    return Microbatch(segments)


def _serve(equals: list[_Cursor], free: int) -> int:
    """Lets jobs of one priority take samples, up to equal shares, then whatever fits; returns the free room."""
    for limit in (free // len(equals), free):
        for cursor in equals:
            while (length := cursor.next_length()) is not None and length <= free:
                if cursor.taken and cursor.taken_tokens + length > limit:
                    break
                cursor.take()
                free -= length
    return free


def plan_lanes(planner: PlanFunction, queues: Sequence[JobQueue], limits: Limits) -> Program:
    """Extends a planner of single samples in one lane to any queues."""
    lanes: dict[str, list[JobQueue]] = {}
    for queue in queues:
        lanes.setdefault(queue.lane, []).append(queue)
    if len(lanes) < 2:
        return _plan_groups(planner, queues, limits)
    programs = [_plan_groups(planner, own, limits) for own in lanes.values()]
    return Program.from_turns(_merged([*lanes.values()], [program.turns for program in programs], limits))


def _merged(lanes: list[list[JobQueue]], turns: list[list[Turn]], limits: Limits) -> list[Turn]:
    rest = [deque(own) for own in turns]
    due: list[Step] = []
    for own in rest:
        if own and not own[0].microbatch.segments:
            due += own.popleft().steps
    merged = [Turn(Microbatch(()), tuple(due))]
    served = {q.job: (-q.priority, q.served_tokens, q.job) for queues in lanes for q in queues}
    left = [sum(len(batch.lengths) for queue in queues for batch in queue.batches) for queues in lanes]
    for _ in range(limits.max_microbatches):
        waiting = [lane for lane, queues in enumerate(lanes) if left[lane] or not all(q.is_all for q in queues)]
        if not waiting or not all(rest[lane] for lane in waiting):
            break
        lane = min(waiting, key=lambda lane: min(served[job] for job in rest[lane][0].microbatch.job_tokens))
        turn = rest[lane].popleft()
        merged.append(turn)
        left[lane] -= len(turn.microbatch.segments)
        for job, num_tokens in turn.microbatch.job_tokens.items():
            priority, so_far, _ = served[job]
            served[job] = (priority, so_far + num_tokens, job)
    return merged


def _plan_groups(planner: PlanFunction, queues: Sequence[JobQueue], limits: Limits) -> Program:
    """Plans groups as single samples, and puts their samples back into the program."""
    if not any(batch.groups for queue in queues for batch in queue.batches):
        return planner(queues, limits)
    whole = [replace(q, batches=tuple(_as_samples(q.job, b, limits.capacity) for b in q.batches)) for q in queues]
    program = planner(whole, limits)
    batches = {(q.job, b.step): b for q in queues for b in q.batches}
    members = {batch: _members(batch[0], b) for batch, b in batches.items() if b.groups}

    def parts(s: Segment) -> tuple[Segment, ...]:
        batch = (s.job, s.step)
        return members[batch][s.index - batches[batch].first] if batch in members else (s,)

    microbatches = (Microbatch(tuple(p for s in m.segments for p in parts(s))) for m in program.microbatches)
    return replace(program, microbatches=tuple(microbatches))


def _as_samples(job: str, batch: Batch, capacity: int) -> Batch:
    """The batch with its groups as samples; a PlanError if one exceeds the capacity."""
    if not batch.groups:
        return batch
    lengths = tuple(sum(s.length for s in group) for group in _members(job, batch))
    if max(lengths) > capacity:
        raise PlanError(
            f"{batch.groups[lengths.index(max(lengths))]} samples that belong together have {max(lengths)} tokens; "
            f"a microbatch holds {capacity}.",
            where=f"job {job} step {batch.step}",
        )
    return Batch(batch.step, batch.first, lengths)


def _members(job: str, batch: Batch) -> list[tuple[Segment, ...]]:
    segments = (Segment(job, batch.step, index, n) for index, n in enumerate(batch.lengths, batch.first))
    return [tuple(itertools.islice(segments, size)) for size in batch.groups]
