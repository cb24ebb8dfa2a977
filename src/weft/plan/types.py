"""Input and output of planners: queues of jobs, limits, and microbatches of segments.

A planner turns `JobQueue`s into a `Program` (`plan/program.py`). The engine executes programs and decides nothing;
`plan/check/` validates any program before it runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from weft.errors import PlanError


@dataclass(frozen=True, slots=True)
class Segment:
    """One sample's run of tokens inside a microbatch."""

    job: str
    step: int
    index: int
    length: int


@dataclass(frozen=True, slots=True)
class Microbatch:
    """A packed buffer of segments of one or more jobs; within a job, in the job's own order."""

    segments: tuple[Segment, ...]

    @property
    def num_tokens(self) -> int:
        return sum(s.length for s in self.segments)

    @property
    def job_lengths(self) -> dict[str, list[int]]:
        lengths: dict[str, list[int]] = {}
        for s in self.segments:
            lengths.setdefault(s.job, []).append(s.length)
        return lengths

    @property
    def job_tokens(self) -> dict[str, int]:
        return {job: sum(lengths) for job, lengths in self.job_lengths.items()}


@dataclass(frozen=True, slots=True)
class Batch:
    """The part of a global batch that has not run: the lengths of samples `first`, `first` + 1, …

    Without lengths, all samples have run and the step is due.
    """

    step: int
    first: int
    lengths: tuple[int, ...]
    groups: tuple[int, ...] = ()
    """Numbers of consecutive samples that share a microbatch; empty: every sample is independent."""

    def __post_init__(self) -> None:
        if self.groups and (min(self.groups) < 1 or sum(self.groups) != len(self.lengths)):
            raise PlanError(f"groups of {self.groups} samples do not divide {len(self.lengths)} samples.")

    @property
    def longest(self) -> int:
        """Tokens of the longest sample, or of the longest group that shares a microbatch."""
        lengths, sizes = iter(self.lengths), self.groups or (1,) * len(self.lengths)
        return max((sum(itertools.islice(lengths, size)) for size in sizes), default=0)


@dataclass(frozen=True, slots=True)
class JobQueue:
    """A planner's view of a job: its next global batches, and how it is served."""

    job: str
    batches: tuple[Batch, ...]
    is_all: bool
    """True if no global batch follows."""
    priority: int = 0
    served_tokens: int = 0
    """Tokens the job has received; among equals the job with fewest goes first."""
    lane: str = ""
    """Jobs of different lanes never share a microbatch."""
    home: int | None = 0
    """Replica of the job. None if its sums do not depend on the order: then all replicas run it, its samples in any
    order."""


@dataclass(frozen=True, slots=True)
class Limits:
    capacity: int
    max_microbatches: int = 16
    row_tile: int = 1
    in_flight: tuple[int, ...] = ()
    """Full microbatches that each stage has memory for between forward and backward; empty: not known."""

    def rows(self, num_tokens: int) -> int:
        return -(-num_tokens // self.row_tile) * self.row_tile

    def of_stages(self, stages: range) -> Limits:
        return replace(self, in_flight=self.in_flight[stages.start : stages.stop])

    def lead(self, most: Sequence[int]) -> list[int]:
        """Maximum number of microbatches in flight on each stage, of those that a schedule wants."""
        return [*map(min, most, self.in_flight or most)]


def max_lead(num_stages: int) -> list[int]:
    """Maximum number of microbatches in flight on each stage, if there is memory: twice what equal ones need, for
    unlike ones."""
    return [2 * num_stages] * num_stages


NOOP = Microbatch(())


def lemma_distance(num_stages: int) -> int:
    """Microbatches from the last of a job's global batch to the first of its next: stages − 1, and at least 1."""
    if num_stages < 1:
        raise PlanError(f"num_stages is {num_stages}; use at least 1.")
    return max(num_stages - 1, 1)


def with_empty_slots(microbatches: Iterable[Microbatch], distance: int) -> tuple[Microbatch, ...]:
    """The stream with empty microbatches where the distance needs them; none at its ends."""
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


LENGTHENED = 2
"""Length of a program per stage, relative to one device: with 16 full microbatches on one device, S stages then idle
about a fortieth of the time while they fill and drain."""


def whole_batches(queues: Sequence[JobQueue], limits: Limits, num_stages: int) -> list[JobQueue]:
    """The queues cut to the same number of global batches, marked as complete."""
    most = max(len(queue.batches) for queue in queues)
    room = LENGTHENED * num_stages * limits.max_microbatches * limits.capacity
    num = 1
    while num < most and sum(sum(b.lengths) for queue in queues for b in queue.batches[: num + 1]) <= room:
        num += 1
    return [replace(queue, batches=queue.batches[:num], is_all=True) for queue in queues]
