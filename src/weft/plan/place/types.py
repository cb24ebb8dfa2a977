"""What placement is given and what it returns: replicas, jobs with the time they still need, and who goes where.

The model of time: jobs that share a replica share its time. A replica of speed s that holds the jobs R ends at

    end = Σ seconds_left of R / s

whatever the order in which it serves them, and the makespan is the latest end of all replicas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weft.errors import PlanError
from weft.plan.admit import Admission, Applicant, Budget

MOVE_S = 5.0
"""What a move costs, in seconds: a checkpoint and a seat. A rank-16 adapter of an 8B backbone is 0.5 GB with its
moments. Written and read at 250 MB/s, which is assumed, that is two seconds each way, and a second is left for its new
neighbours' graphs. Through memory it would be less than a second."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One copy of the backbone that can hold jobs."""

    name: str
    budget: Budget = Budget()
    """Its memory and its seats (`max_jobs`), as admission counts them on one device."""
    speed: float = 1.0
    """Relative to the replica that jobs' seconds are predicted for."""
    is_draining: bool = False
    """It takes no jobs, and those on it move away. It still counts when asked whether a job can ever fit; give a
    replica that is lost but expected back like this, and leave out one that is gone for good."""

    def __post_init__(self) -> None:
        if not (self.speed > 0 and math.isfinite(self.speed)):
            raise PlanError(f"has the speed {self.speed:g}; it must be above 0.", where=self.name)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A job that trains or wants to, with what decides where."""

    applicant: Applicant
    """What admission knows of it."""
    seconds_left: float
    """Predicted, on a replica of speed 1 that it has to itself."""
    replica: str | None = None
    """Where it sits now; None, or a replica that is not there any more: it has no seat."""

    def __post_init__(self) -> None:
        if not (self.seconds_left >= 0 and math.isfinite(self.seconds_left)):
            raise PlanError(f"has {self.seconds_left:g} seconds left; that must be at least 0.", where=self.job)

    @property
    def job(self) -> str:
        """Its name."""
        return self.applicant.job


@dataclass(frozen=True, slots=True)
class Move:
    """A job that gives up its seat on one replica for a seat on another."""

    job: str
    source: str
    target: str


@dataclass(frozen=True)
class JobPlacement:
    """Who trains from this step boundary on, and where."""

    admission: Admission
    """Who starts, keeps on, gives way, waits or is refused, over all replicas; who moves is among those kept."""
    replica_of: Mapping[str, str]
    """The replica of every job that trains, by name."""
    moves: tuple[Move, ...]
    """Jobs that sit on another replica now, by name."""
    makespan_s: float
    """When the last of the jobs that train would end, if no other came in."""


def present_seats(candidates: Sequence[Candidate], replicas: Sequence[Replica]) -> dict[str, str]:
    """Where jobs sit now, on replicas that are there."""
    names = {replica.name for replica in replicas}
    return {c.job: c.replica for c in candidates if c.replica is not None and c.replica in names}


def least_s(candidates: Sequence[Candidate], replicas: Sequence[Replica]) -> float:
    """What all replicas that take jobs need for all the work there is, who waits for a seat included.

    Nothing ends sooner on the whole, so no job moves for an end before that: who waits will fill the gap.
    """
    speed = sum(replica.speed for replica in replicas if not replica.is_draining)
    return sum(c.seconds_left for c in candidates) / speed if speed else 0.0


def or_inf(limit: int | None) -> float:
    """A limit as a number that anything can be compared with; None: no limit."""
    return math.inf if limit is None else float(limit)
