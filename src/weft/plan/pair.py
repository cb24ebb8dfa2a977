"""Which microbatches run side by side on devices that share every layer: MuxTune's two groups, on one stage.

Problem: given a stream of microbatches, as many pairs as can be, subject to: no job has samples in both of a pair,
both together have no more rows than there is room for, every job's samples keep their order, and a job steps behind its
global batch and before its next. Method: the first
microbatch that is left takes the next one behind it that shares no job with it, nor with any that it would overtake; so
no step is between the two, and no job's order changes. O(microbatches × overtaken). Every microbatch of two streams in
turn that have no common job finds a partner, as long as both last; `two_groups` makes such streams.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.plan.pack.greedy import pack
from weft.plan.pipeline.stream import read_stream
from weft.plan.program import Backward, Forward, Instruction, Program, Step
from weft.plan.types import JobQueue, Limits, Microbatch

FARTHEST = 16
"""Microbatches that one may overtake to be a pair with another."""


@dataclass(frozen=True)
class RowsHeld:
    """How many rows two microbatches may have together, and in what tiles rows are counted."""

    most: int
    row_tile: int = 1

    def fit(self, pair: Sequence[Microbatch]) -> bool:
        """Whether two microbatches may be in memory at once."""
        return sum(-(-own.num_tokens // self.row_tile) * self.row_tile for own in pair) <= self.most


def side_by_side(microbatches: Sequence[Microbatch], held: RowsHeld | None = None) -> Program:
    """The program of one stage that runs a stream in pairs, as far as there are any.

    `microbatches` hold whole global batches, each job's in order; `held`: what bounds a pair, None: nothing does.
    """
    turns = _turns(microbatches, held)
    stream = read_stream([microbatch for turn in turns for microbatch in turn])
    instructions: list[Instruction] = []
    pairs: list[tuple[int, int]] = []
    k = 0
    for turn in turns:
        own = range(k, k + len(turn))
        instructions += [*(Forward(each) for each in own), *(Backward(each) for each in own)]
        ended = sorted(batch for each in own for batch in stream.completes.get(each, ()))
        instructions += [Step(job, step) for job, step in ended]
        pairs += [(own[0], own[1])] if len(own) == 2 else []
        k += len(turn)
    return Program(stream.microbatches, (tuple(instructions),), pairs=tuple(pairs))


def two_groups(queues: Sequence[JobQueue], capacity: int) -> tuple[tuple[tuple[str, ...], ...], list[Microbatch]]:
    """Jobs in two groups of about as many tokens, and their microbatches in turn; no two for a single job.

    `queues` hold whole global batches; `capacity`: of a microbatch, but a longer sample has one of its own.
    """
    sizes = {queue.job: sum(sum(batch.lengths) for batch in queue.batches) for queue in queues}
    groups: tuple[list[str], list[str]] = ([], [])
    for job in sorted(sizes, key=lambda job: (-sizes[job], job)):
        min(groups, key=lambda own: sum(sizes[other] for other in own)).append(job)
    members = [[replace(queue, is_all=True) for queue in queues if queue.job in own] for own in groups if own]
    capacity = max([capacity, *(batch.longest for queue in queues for batch in queue.batches)])
    packed = [pack(own, Limits(capacity, sys.maxsize)).microbatches for own in members]
    stream = [m for turn in itertools.zip_longest(*packed) for m in turn if m is not None]
    return tuple(tuple(queue.job for queue in own) for own in members), stream


def _turns(microbatches: Sequence[Microbatch], held: RowsHeld | None) -> list[tuple[Microbatch, ...]]:
    """Pairs, and microbatches that have no partner, in the order in which they run."""
    left = [(microbatch, frozenset(microbatch.job_tokens)) for microbatch in microbatches]
    found: list[tuple[Microbatch, ...]] = []
    while left:
        (first, taken), found_at = left.pop(0), None
        for place, (other, jobs) in enumerate(left[:FARTHEST]):
            if not jobs & taken and (held is None or held.fit((first, other))):
                found_at = place
                break
            taken |= jobs
        found.append((first,) if found_at is None else (first, left.pop(found_at)[0]))
    return found
