"""Microbatches side by side on devices that share every layer: MuxTune's two groups.

In a pipeline a microbatch is cut in two by its jobs (`in_halves`); both halves go through all stages together, so its
plan holds for them. On one stage two of a stream may be a pair as well (`side_by_side`).

Problem: given a stream of microbatches, as many pairs as possible, subject to: no job has samples in both of a pair,
both together fit into the row limit, every job's samples keep their order, and a job steps after its global batch and
before its next. Method: the first microbatch left is paired with the next one that shares no job with it, nor with any
that it would overtake; so no step is between the two, and no job's order changes. O(microbatches × overtaken). In two
interleaved streams without a common job every microbatch finds a partner, as long as both last; `two_groups` makes such
streams.
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
"""Microbatches that a partner may overtake."""


@dataclass(frozen=True)
class RowsHeld:
    most: int
    row_tile: int = 1

    def fit(self, pair: Sequence[Microbatch]) -> bool:
        return sum(-(-own.num_tokens // self.row_tile) * self.row_tile for own in pair) <= self.most


def side_by_side(
    microbatches: Sequence[Microbatch],
    held: RowsHeld | None = None,
    build: Callable[[Sequence[Microbatch]], Program] | None = None,
) -> Program:
    """The program that runs a stream in pairs, as far as possible. `microbatches` hold whole global batches, each job's
    in order. `held`: the row limit of a pair. `build`: makes the program of what goes through the stages together;
    None: that of one stage."""
    turns = _turns(microbatches, held)
    return cut((build or one_stage)([together(own) for own in turns]), turns)


def one_stage(microbatches: Sequence[Microbatch]) -> Program:
    """The program of a stream on one stage: each forward and backward, then the steps that it completes."""
    stream = read_stream(microbatches)
    instructions: list[Instruction] = []
    for k in range(len(stream.microbatches)):
        instructions += [Forward(k), Backward(k), *(Step(*batch) for batch in stream.completes.get(k, ()))]
    return Program(stream.microbatches, (tuple(instructions),))


def in_halves(program: Program, held: RowsHeld | None = None) -> Program:
    """The program with every microbatch cut into two with half of its jobs each, where these fit."""
    return cut(program, [_halves(microbatch, held) for microbatch in program.microbatches])


def cut(program: Program, parts: Sequence[Sequence[Microbatch]]) -> Program:
    """The program with each microbatch in one or two parts, which are a pair."""
    ends = [*itertools.accumulate(map(len, parts))]
    numbers = [range(end - len(own), end) for end, own in zip(ends, parts, strict=True)]
    stages = tuple(tuple(each for i in own for each in renumbered(i, numbers, 0)) for own in program.stages)
    pairs = tuple((own[0], own[1]) for own in numbers if len(own) == 2)
    return replace(program, microbatches=tuple(m for own in parts for m in own), stages=stages, pairs=pairs)


def uncut(program: Program) -> list[tuple[Microbatch, ...]]:
    """The parts of each microbatch: single ones, and both of each pair."""
    firsts, seconds = ({pair[i] for pair in program.pairs} for i in (0, 1))
    assert seconds == {first + 1 for first in firsts}, "parts have consecutive numbers"
    starts = [k for k in range(len(program.microbatches)) if k not in seconds]
    return [program.microbatches[k : k + 2] if k in firsts else program.microbatches[k : k + 1] for k in starts]


def together(parts: Sequence[Microbatch]) -> Microbatch:
    return parts[0] if len(parts) == 1 else Microbatch(tuple(s for part in parts for s in part.segments))


def _halves(microbatch: Microbatch, held: RowsHeld | None) -> tuple[Microbatch, ...]:
    """The largest job first, each to the smaller half; undivided if there are no two jobs or the halves do not fit."""
    sizes: Counter[int] = Counter({0: 0, 1: 0})
    half_of: dict[str, int] = {}
    for job, num_tokens in sorted(microbatch.job_tokens.items(), key=lambda own: (-own[1], own[0])):
        half_of[job] = min(sizes, key=lambda half: (sizes[half], half))
        sizes[half_of[job]] += num_tokens
    halves = tuple(Microbatch(tuple(s for s in microbatch.segments if half_of[s.job] == half)) for half in (0, 1))
    return halves if len(half_of) > 1 and (held is None or held.fit(halves)) else (microbatch,)


def two_groups(queues: Sequence[JobQueue], capacity: int) -> tuple[tuple[tuple[str, ...], ...], list[Microbatch]]:
    """Jobs in two groups of about equal tokens, and their microbatches in turn; one group for a single job. `queues`
    hold whole global batches; `capacity` is raised to the longest sample."""
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
    """Pairs and single microbatches in the order in which they run."""
    left = [(microbatch, frozenset(microbatch.job_tokens)) for microbatch in microbatches]
    found: list[tuple[Microbatch, ...]] = []
    while left:
        (first, taken), found_at = left.pop(0), None
        for index, (other, jobs) in enumerate(left[:FARTHEST]):
            if not jobs & taken and (held is None or held.fit((first, other))):
                found_at = index
                break
            taken |= jobs
        found.append((first,) if found_at is None else (first, left.pop(found_at)[0]))
    return found
