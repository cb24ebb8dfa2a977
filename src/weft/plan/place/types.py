"""Input and output of placement: replicas, jobs with the time they need, and the assignment.

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
"""Cost of a move in seconds. A rank-16 adapter of an 8B backbone is 0.5 GB with its moments: at 250 MB/s, which is
assumed, two seconds to write and two to read, and one for its new neighbours' graphs. Through memory it would be less
than a second."""


@dataclass(frozen=True, slots=True)
class Replica:
    name: str
    budget: Budget = Budget()
    """Its memory and seats (`max_jobs`), as for admission on one device."""
    speed: float = 1.0
    """Relative to the replica that jobs' seconds are predicted for."""
    is_draining: bool = False
    """True if it takes no jobs and those on it move away. It still counts for whether a job can ever fit: use it for a
    replica that is expected back, and leave out one that is lost for good."""

    def __post_init__(self) -> None:
        if not (self.speed > 0 and math.isfinite(self.speed)):
            raise PlanError(f"has the speed {self.speed:g}; it must be above 0.", where=self.name)


@dataclass(frozen=True, slots=True)
class Candidate:
    applicant: Applicant
    seconds_left: float
    """Predicted seconds on a replica of speed 1 without other jobs."""
    replica: str | None = None
    """Present replica; None, or a replica that no longer exists: no seat."""

    def __post_init__(self) -> None:
        if not (self.seconds_left >= 0 and math.isfinite(self.seconds_left)):
            raise PlanError(f"has {self.seconds_left:g} seconds left; that must be at least 0.", where=self.job)

    @property
    def job(self) -> str:
        return self.applicant.job


@dataclass(frozen=True, slots=True)
class Move:
    job: str
    source: str
    target: str


@dataclass(frozen=True)
class JobPlacement:
    admission: Admission
    """The decision over all replicas; jobs that move are among those kept."""
    replica_of: Mapping[str, str]
    moves: tuple[Move, ...]
    makespan_s: float
    """End of the last training job if no other is admitted."""


def present_seats(candidates: Sequence[Candidate], replicas: Sequence[Replica]) -> dict[str, str]:
    names = {replica.name for replica in replicas}
    return {c.job: c.replica for c in candidates if c.replica is not None and c.replica in names}


def least_s(candidates: Sequence[Candidate], replicas: Sequence[Replica]) -> float:
    """Seconds that the replicas taking jobs need for all work, waiting jobs included. A lower bound of the makespan, so
    no job moves for an end before it: waiting jobs will fill the gap."""
    speed = sum(replica.speed for replica in replicas if not replica.is_draining)
    return sum(c.seconds_left for c in candidates) / speed if speed else 0.0


def or_inf(limit: int | None) -> float:
    return math.inf if limit is None else float(limit)
