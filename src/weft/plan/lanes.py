"""Lanes and groups for any planner of one device: jobs that may not share a microbatch, samples that must.

A planner knows neither. Samples of a group are given to it as one sample of their length together, and each lane is
planned by itself. The lanes' turns are then merged: next comes the lane whose next microbatch holds the job that would
be served first, by priority, then by tokens served so far, then by name. So a lane of one job gets as much as that job
would get among equals. The merged program ends where it is long enough, or where a lane has no turn left but its jobs
have more to run, so that none waits for the next program longer than it must. One lane without groups gets exactly the
planner's own program. O(segments + turns · lanes · jobs).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from weft.errors import PlanError
from weft.plan.program import Planner, Program, Step, Turn
from weft.plan.types import Batch, JobQueue, Limits, Microbatch, Segment


def plan_lanes(planner: Planner, queues: Sequence[JobQueue], limits: Limits) -> Program:
    """The program of a planner that packs whole samples of jobs that may share microbatches, for any queues."""
    lanes: dict[str, list[JobQueue]] = {}
    for queue in queues:
        lanes.setdefault(queue.lane, []).append(queue)
    if len(lanes) < 2:
        return _plan_groups(planner, queues, limits)
    programs = [_plan_groups(planner, own, limits) for own in lanes.values()]
    return Program.from_turns(_merged([*lanes.values()], [program.turns for program in programs], limits))


def _merged(lanes: list[list[JobQueue]], turns: list[list[Turn]], limits: Limits) -> list[Turn]:
    """The turns of all lanes in one order."""
    rest = [deque(own) for own in turns]
    due: list[Step] = []
    for own in rest:
        if own and not own[0].microbatch.segments:
            due += own.popleft().steps
    merged = [Turn(Microbatch(()), tuple(due))]
    served = {q.job: (-q.priority, q.served_tokens, q.job) for queues in lanes for q in queues}
    left = [_num_samples(queues) for queues in lanes]
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


def _num_samples(queues: Sequence[JobQueue]) -> int:
    return sum(len(batch.lengths) for queue in queues for batch in queue.batches)


def _plan_groups(planner: Planner, queues: Sequence[JobQueue], limits: Limits) -> Program:
    """The planner's program for groups as single samples, with their samples put back in their place."""
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
    """The batch with its groups as samples; a PlanError if no microbatch can hold one."""
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
    """The segments of each group of a batch."""
    segments = (Segment(job, batch.step, index, n) for index, n in enumerate(batch.lengths, batch.first))
    return [tuple(itertools.islice(segments, size)) for size in batch.groups]
