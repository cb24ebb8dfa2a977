"""What planners are given and what they fill: queues of jobs, limits, and microbatches of segments.

A planner turns `JobQueue`s into a `Program` (`plan/program.py`). The engine executes programs and decides nothing;
`plan/check/` validates any program before it runs.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from weft.errors import PlanError


@dataclass(frozen=True, slots=True)
class Segment:
    """One sample's run of tokens inside a microbatch."""

    job: str
    step: int
    """Which global batch of the job, counted from 0."""
    index: int
    """Place of the sample inside that global batch."""
    length: int
    """Tokens."""


@dataclass(frozen=True, slots=True)
class Microbatch:
    """A packed buffer of segments of one or more jobs; within a job, in the job's own order."""

    segments: tuple[Segment, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all segments."""
        return sum(s.length for s in self.segments)

    @property
    def job_tokens(self) -> dict[str, int]:
        """Tokens of each job, in the order in which the jobs come."""
        tokens: dict[str, int] = {}
        for s in self.segments:
            tokens[s.job] = tokens.get(s.job, 0) + s.length
        return tokens


@dataclass(frozen=True, slots=True)
class Batch:
    """What is left to run of one global batch: sample `first`, `first` + 1, … have these lengths.

    No lengths: all samples have run, and the step is due.
    """

    step: int
    first: int
    lengths: tuple[int, ...]
    groups: tuple[int, ...] = ()
    """How many samples in a row belong together and share a microbatch; empty: every sample is by itself."""

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
    """What a planner knows of a job: its next global batches, and how it is to be served."""

    job: str
    batches: tuple[Batch, ...]
    is_all: bool
    """True if no global batch follows those listed."""
    priority: int = 0
    served_tokens: int = 0
    """Tokens the job has had so far; among equals, who had least goes first."""
    lane: str = ""
    """Jobs of different lanes never share a microbatch; most are in the common one."""
    home: int | None = 0
    """The replica that runs it; None: its sums do not depend on the order, so all of several do, and its samples may be
    in any order."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a microbatch may hold."""

    capacity: int
    """Most tokens of one microbatch."""
    max_microbatches: int = 16
    """Most microbatches of one program."""
