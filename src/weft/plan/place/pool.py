"""The memory and seats of several replicas together, for admission's walk: a job is admitted if a replica has room.

A job keeps its seat if it can. Others go where they fit most tightly without taking what later jobs sit on; otherwise
where they take least of it, since earlier jobs come first. If no replica has room, one admitted job moves to another
replica to make some; if that does not help, all are packed again by a search of bounded length. So a job waits only if
these find no seat for it; with few jobs and replicas the search is complete.

The model of time: jobs that share a replica share its time. A replica of speed s that holds the jobs R ends at

    end = Σ seconds_left of R / s

whatever the order in which it serves them, and the makespan is the latest end of all replicas.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from weft.errors import PlanError, counted, size
from weft.job_state import Reason, ReasonCode
from weft.plan.admit import Admission, Applicant, Budget, DeviceRoom

MOVE_S = 5.0
"""Cost of a move in seconds. A rank-16 adapter of an 8B backbone is 0.5 GB with its moments: at 250 MB/s, which is
assumed, two seconds to write and two to read, and one for its new neighbours' graphs. Through memory it would be less
than a second."""


@dataclass(frozen=True, slots=True)
class Replica:
    name: str
    budget: Budget = Budget()
    """Memory and seats (`max_jobs`) of the replica, as for admission on one device."""
    speed: float = 1.0
    """Speed relative to the replica that jobs' seconds are predicted for."""
    is_draining: bool = False
    """True if it takes no jobs and those on it move away. It still counts for whether a job can ever fit: use it for a
    replica that is expected back, and leave out one that is lost for good."""


@dataclass(frozen=True, slots=True)
class Candidate:
    applicant: Applicant
    seconds_left: float
    """Predicted seconds on a replica of speed 1 without other jobs."""
    replica: str | None = None
    """Present replica; None, or a replica that no longer exists: no seat."""
    home: str | None = None
    """Replica that it is planned on: it starts there if there is room, and leaves it as it would leave a seat."""

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


def wanted_seats(candidates: Sequence[Candidate], replicas: Sequence[Replica]) -> dict[str, str]:
    """Present replicas, and homes of jobs without one."""
    at_home = present_seats([replace(c, replica=c.home) for c in candidates], replicas)
    return at_home | present_seats(candidates, replicas)


def least_s(candidates: Sequence[Candidate], replicas: Sequence[Replica]) -> float:
    """Seconds that the replicas taking jobs need for all work, waiting jobs included. A lower bound of the makespan, so
    no job moves for an end before it: waiting jobs will fill the gap."""
    speed = sum(replica.speed for replica in replicas if not replica.is_draining)
    return sum(c.seconds_left for c in candidates) / speed if speed else 0.0


def or_inf(limit: int | None) -> float:
    return math.inf if limit is None else float(limit)


MAX_SEATINGS = 6000
"""Jobs that one walk may seat in repacking, some 50 ms; a third of it in one attempt."""


class _Seats:
    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.usable_bytes = np.array([or_inf(replica.budget.usable_bytes) for replica in replicas])
        self.max_jobs = np.array([or_inf(replica.budget.max_jobs) for replica in replicas])
        self.held_bytes, self.num_jobs = np.zeros(len(replicas)), np.zeros(len(replicas))
        self.at: dict[str, int] = {}

    def has_room(self, num_bytes: int) -> npt.NDArray[np.bool_]:
        return (self.held_bytes + num_bytes <= self.usable_bytes) & (self.num_jobs < self.max_jobs)

    def add(self, applicant: Applicant, index: int, sign: int = 1) -> None:
        """Counts a job in or, with sign -1, out."""
        self.held_bytes[index] += sign * applicant.num_bytes
        self.num_jobs[index] += sign
        self.at[applicant.job] = index

    def pack(self, jobs: Sequence[Applicant], present: Mapping[str, int], limit: int) -> tuple[bool, int]:
        """Seats all jobs by depth-first search; returns whether it succeeded, and the number of jobs seated on the way.
        A job is tried on its `present` replica, then where it fits most tightly. Fails beyond `limit` seatings."""
        choices, num_seatings = [self._options(jobs[0], present)], 0
        while choices and num_seatings < limit:
            if not choices[-1]:
                choices.pop()
                if choices:
                    self.add(jobs[len(choices) - 1], self.at[jobs[len(choices) - 1].job], -1)
                continue
            self.add(jobs[len(choices) - 1], choices[-1].pop())
            num_seatings += 1
            if len(choices) == len(jobs):
                return True, num_seatings
            choices.append(self._options(jobs[len(choices)], present))
        return False, num_seatings

    def _options(self, job: Applicant, present: Mapping[str, int]) -> list[int]:
        """Replicas with room for a job, the best last; of several with equal room, only the first."""
        left = self.usable_bytes - self.held_bytes
        seats_left = self.max_jobs - self.num_jobs
        seat = present.get(job.job)
        alike: dict[tuple[float, float], int] = {}
        for index in np.flatnonzero(self.has_room(job.num_bytes)).tolist():
            alike.setdefault((left[index], seats_left[index]), index)
        indices = sorted(alike.values(), key=lambda index: (-left[index], -index))
        if seat is not None and self.has_room(job.num_bytes)[seat]:
            indices = [index for index in indices if index != seat] + [seat]
        return indices


class PooledRoom:
    def __init__(self, replicas: Sequence[Replica], applicants: Iterable[Applicant], seats: Mapping[str, str]) -> None:
        """`seats`: present or desired replicas, by job."""
        self.order: list[Applicant] = []
        budgets = [replica.budget for replica in replicas]
        self._largest = max(budgets, key=lambda budget: or_inf(budget.usable_bytes), default=None)
        self._open = [replica for replica in replicas if not replica.is_draining]
        self._taken = _Seats(self._open)
        indices = {replica.name: index for index, replica in enumerate(self._open)}
        self._seats = {job: indices[name] for job, name in seats.items() if name in indices}
        self._later = _Seats(self._open)
        """Jobs that have a seat and are considered later in the walk."""
        self._refused_bytes = np.inf
        """Fewest bytes that are known not to fit now."""
        self._seatings_left = MAX_SEATINGS
        for applicant in applicants:
            if applicant.job in self._seats:
                self._later.add(applicant, self._seats[applicant.job])

    @property
    def replica_of(self) -> dict[str, str]:
        return {job: self._open[index].name for job, index in self._taken.at.items()}

    def why_never(self, num_bytes: int) -> Reason | None:
        return None if self._largest is None else self._largest.why_never(num_bytes)

    def take(self, applicant: Applicant) -> Reason | None:
        seat = self._seats.get(applicant.job)
        if seat is not None:
            self._later.add(applicant, seat, -1)
        if applicant.num_bytes >= self._refused_bytes or not self._seat(applicant, seat):
            self._refused_bytes = min(self._refused_bytes, applicant.num_bytes)
            return self._why_not(applicant)
        self.order.append(applicant)
        self._refused_bytes = np.inf
        return None

    def _seat(self, applicant: Applicant, seat: int | None) -> bool:
        """Seats a job; False if there is no room and none can be made."""
        roomy = self._taken.has_room(applicant.num_bytes)
        if not roomy.any():
            return self._make_room(applicant) or self._repack(applicant)
        is_own = seat is not None and bool(roomy[seat])
        self._taken.add(applicant, seat if is_own and seat is not None else self._best(applicant, roomy))
        return True

    def _best(self, applicant: Applicant, roomy: npt.NDArray[np.bool_]) -> int:
        """Best replica with room: the tightest fit beside all present jobs, else the one where least is taken from
        them."""
        taken, later = self._taken, self._later
        left_bytes = taken.usable_bytes - taken.held_bytes - later.held_bytes - applicant.num_bytes
        left_jobs = taken.max_jobs - taken.num_jobs - later.num_jobs - 1
        beside = roomy & (left_bytes >= 0) & (left_jobs >= 0)
        if beside.any():
            return _least(left_bytes, beside)
        return _least(np.maximum(-left_bytes, 0.0), roomy)

    def _make_room(self, applicant: Applicant) -> bool:
        """Seats a job where another can leave for a third replica; False if no such move helps."""
        taken = self._taken
        lacking = taken.held_bytes + applicant.num_bytes - taken.usable_bytes
        can_hold = taken.usable_bytes >= applicant.num_bytes
        free = np.where(taken.num_jobs < taken.max_jobs, taken.usable_bytes - taken.held_bytes, -1)
        # Jobs away from their seat move before those on it, small ones before large ones.
        for one in sorted(self.order, key=lambda a: (self._seats.get(a.job) == taken.at[a.job], a.num_bytes, a.job)):
            index = taken.at[one.job]
            others = free >= one.num_bytes
            others[index] = False
            if can_hold[index] and lacking[index] <= one.num_bytes and others.any():
                taken.add(one, index, -1)
                taken.add(one, self._best(one, others))
                taken.add(applicant, index)
                return True
        return False

    def _repack(self, applicant: Applicant) -> bool:
        """Packs all jobs and one more from scratch, largest first; False if the search finds no way."""
        seats, jobs = _Seats(self._open), sorted([*self.order, applicant], key=lambda a: (-a.num_bytes, a.job))
        has_seats = len(jobs) <= seats.max_jobs.sum()
        has_bytes = sum(a.num_bytes for a in jobs) <= seats.usable_bytes.sum()
        if not (has_seats and has_bytes and self._seatings_left > 0):
            return False
        limit = min(MAX_SEATINGS // 3, self._seatings_left)
        found, num_seatings = seats.pack(jobs, self._seats, limit)
        self._seatings_left -= num_seatings
        if found:
            self._taken = seats
        return found

    def _why_not(self, applicant: Applicant) -> Reason:
        """Returns the reason in the words of admission on one device if there is only one replica."""
        if len(self._open) == 1:
            held_bytes = sum(a.num_bytes for a in self.order)
            reason = DeviceRoom(self._open[0].budget, list(self.order), held_bytes).take(applicant)
            assert reason is not None
            return reason
        if not self._open:
            return Reason(ReasonCode.NO_SEAT, "waits for a replica: none takes jobs now")
        taken = self._taken
        left = (taken.usable_bytes - taken.held_bytes)[taken.num_jobs < taken.max_jobs]
        if not len(left):
            others = f"{counted(len(self.order), 'job')} on {counted(len(self._open), 'replica')}"
            text = f"waits for a seat: there is none beside {others}"
            return Reason(ReasonCode.NO_SEAT, text)
        most, needs = size(int(left.max())), size(applicant.num_bytes)
        text = f"waits for memory: it needs {needs}, and no replica with a free seat has more than {most} left"
        return Reason(ReasonCode.NO_MEMORY_NOW, text)


def _least(values: npt.NDArray[np.float64], among: npt.NDArray[np.bool_]) -> int:
    """The first index with the least value among these; values may be infinite."""
    indices = np.flatnonzero(among)
    return int(indices[values[indices].argmin()])
