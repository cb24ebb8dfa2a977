"""Which microbatches run side by side on devices that share every layer: MuxTune's two groups.

In a pipeline a microbatch is cut in two by its jobs (`in_halves`): both halves go through all stages together, so that
whatever was planned for it holds for them. On one stage two of a stream may be a pair as well (`side_by_side`).
Problem: given a stream of microbatches, as many pairs as can be, subject to: no job has samples in both of a pair,
both together have no more rows than there is room for, every job's samples keep their order, and a job steps behind its
global batch and before its next. Method: the first microbatch that is left takes the next one behind it that shares no
job with it, nor with any that it would overtake; so no step is between the two, and no job's order changes.
O(microbatches × overtaken). Every microbatch of two streams in turn that have no common job finds a partner, as long
as both last; `two_groups` makes such streams.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from weft.plan.pack.greedy import pack
from weft.plan.pipeline.build import renumbered
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


def side_by_side(
    microbatches: Sequence[Microbatch],
    held: RowsHeld | None = None,
    build: Callable[[Sequence[Microbatch]], Program] | None = None,
) -> Program:
    """The program that runs a stream in pairs, as far as there are any.

    `microbatches` hold whole global batches, each job's in order; `held`: what bounds a pair, None: nothing does;
    `build`: makes the program of what goes through the stages together, None: that of one stage.
    """
    turns = _turns(microbatches, held)
    return cut((build or one_stage)([together(own) for own in turns]), turns)


def one_stage(microbatches: Sequence[Microbatch]) -> Program:
    """A stream on one stage: each forward and back, then the steps that it completes."""
    stream = read_stream(microbatches)
    instructions: list[Instruction] = []
    for k in range(len(stream.microbatches)):
        instructions += [Forward(k), Backward(k), *(Step(*batch) for batch in stream.completes.get(k, ()))]
    return Program(stream.microbatches, (tuple(instructions),))


def in_halves(program: Program, held: RowsHeld | None = None) -> Program:
    """The same program, in which every microbatch runs as two with half of its jobs each, as far as these fit."""
    return cut(program, [_halves(microbatch, held) for microbatch in program.microbatches])


def cut(program: Program, parts: Sequence[Sequence[Microbatch]]) -> Program:
    """The same program, with each microbatch in one or two parts, which are a pair."""
    ends = [*itertools.accumulate(map(len, parts))]
    numbers = [range(end - len(own), end) for end, own in zip(ends, parts, strict=True)]
    stages = tuple(tuple(each for i in own for each in renumbered(i, numbers, 0)) for own in program.stages)
    pairs = tuple((own[0], own[1]) for own in numbers if len(own) == 2)
    return replace(program, microbatches=tuple(m for own in parts for m in own), stages=stages, pairs=pairs)


def uncut(program: Program) -> list[tuple[Microbatch, ...]]:
    """The parts of what goes through the stages together: single microbatches, and both of each pair."""
    firsts, seconds = ({pair[place] for pair in program.pairs} for place in (0, 1))
    assert seconds == {first + 1 for first in firsts}, "parts have numbers one behind the other"
    starts = [k for k in range(len(program.microbatches)) if k not in seconds]
    return [program.microbatches[k : k + 2] if k in firsts else program.microbatches[k : k + 1] for k in starts]


def together(parts: Sequence[Microbatch]) -> Microbatch:
    """One microbatch with the samples of all."""
    return parts[0] if len(parts) == 1 else Microbatch(tuple(s for part in parts for s in part.segments))


def _halves(microbatch: Microbatch, held: RowsHeld | None) -> tuple[Microbatch, ...]:
    """The largest job first, each to the smaller half; whole where there are no two jobs, or no room for two."""
    sizes: Counter[int] = Counter({0: 0, 1: 0})
    half_of: dict[str, int] = {}
    for job, num_tokens in sorted(microbatch.job_tokens.items(), key=lambda own: (-own[1], own[0])):
        half_of[job] = min(sizes, key=lambda half: (sizes[half], half))
        sizes[half_of[job]] += num_tokens
    halves = tuple(Microbatch(tuple(s for s in microbatch.segments if half_of[s.job] == half)) for half in (0, 1))
    return halves if len(half_of) > 1 and (held is None or held.fit(halves)) else (microbatch,)


def two_groups(queues: Sequence[JobQueue], capacity: int) -> tuple[tuple[tuple[str, ...], ...], list[Microbatch]]:
    """Jobs in two groups of about as many tokens, and their microbatches in turn; no two for a single job.

    `queues` hold whole global batches; `capacity`: of a microbatch, or that of the longest sample.
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
