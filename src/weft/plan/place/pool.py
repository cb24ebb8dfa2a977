"""The room of many replicas together, for admission's walk: a job is taken if a replica has room for it.

A job keeps its seat if it can. Others go where they fit best without taking what later jobs sit on; if there is no such
place, where they take least of it, since who is earlier in the walk comes first. If no replica has room, a job that was
taken before goes over to another replica to make some; and if that does not help, all are packed anew by a search of
bounded length. So a job waits only where these find no way to seat it beside those before it; with few jobs and
replicas the search is complete, and then there is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from weft.job_state import Reason, ReasonCode
from weft.plan.admit import Applicant, DeviceRoom
from weft.plan.place.types import Replica, or_inf
from weft.wording import counted, size

MAX_SEATINGS = 6000
"""How many jobs a walk may seat while it tries to pack all anew, some 50 ms; a third of that in one try."""


class _Seats:
    """The replicas that take jobs, and what those on them hold."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.usable_bytes = np.array([or_inf(replica.budget.usable_bytes) for replica in replicas])
        self.max_jobs = np.array([or_inf(replica.budget.max_jobs) for replica in replicas])
        self.held_bytes, self.num_jobs = np.zeros(len(replicas)), np.zeros(len(replicas))
        self.at: dict[str, int] = {}
        """The replica of every job that has been taken."""

    def has_room(self, num_bytes: int) -> npt.NDArray[np.bool_]:
        """On every replica, for one more job."""
        return (self.held_bytes + num_bytes <= self.usable_bytes) & (self.num_jobs < self.max_jobs)

    def add(self, applicant: Applicant, place: int, sign: int = 1) -> None:
        """Counts a job in or, with the sign -1, out."""
        self.held_bytes[place] += sign * applicant.num_bytes
        self.num_jobs[place] += sign
        self.at[applicant.job] = place

    def pack(self, jobs: Sequence[Applicant], own: Mapping[str, int], limit: int) -> tuple[bool, int]:
        """Seats all jobs by depth-first search; whether it found a way, and how many jobs it seated on the way.

        A job is tried where it sits (`own`), then where it fits most tightly. Without a way within the limit, False.
        """
        choices, num_seatings = [self._options(jobs[0], own)], 0
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
            choices.append(self._options(jobs[len(choices)], own))
        return False, num_seatings

    def _options(self, job: Applicant, own: Mapping[str, int]) -> list[int]:
        """Replicas with room for a job, the best last; of several with as much left, the first only."""
        left = self.usable_bytes - self.held_bytes
        seats_left = self.max_jobs - self.num_jobs
        seat = own.get(job.job)
        alike: dict[tuple[float, float], int] = {}
        for place in np.flatnonzero(self.has_room(job.num_bytes)).tolist():
            alike.setdefault((left[place], seats_left[place]), place)
        places = sorted(alike.values(), key=lambda place: (-left[place], -place))
        if seat is not None and self.has_room(job.num_bytes)[seat]:
            places = [place for place in places if place != seat] + [seat]
        return places


class PooledRoom:
    """A `Room` of many replicas; afterwards `replica_of` says where each job that was taken sits."""

    def __init__(self, replicas: Sequence[Replica], applicants: Iterable[Applicant], seats: Mapping[str, str]) -> None:
        """`seats`: where jobs sit, or should sit, if they are taken."""
        self.order: list[Applicant] = []
        budgets = [replica.budget for replica in replicas]
        self._largest = max(budgets, key=lambda budget: or_inf(budget.usable_bytes), default=None)
        self._open = [replica for replica in replicas if not replica.is_draining]
        self._taken = _Seats(self._open)
        places = {replica.name: place for place, replica in enumerate(self._open)}
        self._seats = {job: places[name] for job, name in seats.items() if name in places}
        self._later = _Seats(self._open)
        """Jobs that sit somewhere and whose turn is yet to come."""
        self._refused_bytes = np.inf
        """There is no room for so many bytes, as things are."""
        self._seatings_left = MAX_SEATINGS
        for applicant in applicants:
            if applicant.job in self._seats:
                self._later.add(applicant, self._seats[applicant.job])

    @property
    def replica_of(self) -> dict[str, str]:
        """The replica of every job that was taken."""
        return {job: self._open[place].name for job, place in self._taken.at.items()}

    def why_never(self, num_bytes: int) -> Reason | None:
        """Why a job of so many bytes fits on no replica, even alone; None if it does on one."""
        return None if self._largest is None else self._largest.why_never(num_bytes)

    def take(self, applicant: Applicant) -> Reason | None:
        """Gives a job a seat on a replica; if none has room, the reason."""
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
        """Seats a job; False if no replica has room, nor can room be made."""
        roomy = self._taken.has_room(applicant.num_bytes)
        if not roomy.any():
            return self._make_room(applicant) or self._repack(applicant)
        is_own = seat is not None and bool(roomy[seat])
        self._taken.add(applicant, seat if is_own and seat is not None else self._best(applicant, roomy))
        return True

    def _best(self, applicant: Applicant, roomy: npt.NDArray[np.bool_]) -> int:
        """Of the replicas with room, the tightest fit beside all who sit there, else where least is taken from them."""
        taken, later = self._taken, self._later
        left_bytes = taken.usable_bytes - taken.held_bytes - later.held_bytes - applicant.num_bytes
        left_jobs = taken.max_jobs - taken.num_jobs - later.num_jobs - 1
        beside = roomy & (left_bytes >= 0) & (left_jobs >= 0)
        if beside.any():
            return _least(left_bytes, beside)
        return _least(np.maximum(-left_bytes, 0.0), roomy)

    def _make_room(self, applicant: Applicant) -> bool:
        """Seats a job where another makes room by going over to a third replica; False if no such move helps."""
        taken = self._taken
        lacking = taken.held_bytes + applicant.num_bytes - taken.usable_bytes
        can_hold = taken.usable_bytes >= applicant.num_bytes
        free = np.where(taken.num_jobs < taken.max_jobs, taken.usable_bytes - taken.held_bytes, -1)
        # Who does not sit there moves before who does, and small ones before large ones.
        for one in sorted(self.order, key=lambda a: (self._seats.get(a.job) == taken.at[a.job], a.num_bytes, a.job)):
            place = taken.at[one.job]
            others = free >= one.num_bytes
            others[place] = False
            if can_hold[place] and lacking[place] <= one.num_bytes and others.any():
                taken.add(one, place, -1)
                taken.add(one, self._best(one, others))
                taken.add(applicant, place)
                return True
        return False

    def _repack(self, applicant: Applicant) -> bool:
        """Packs all jobs and one more from nothing, the largest first; False if there is no way, or none is found."""
        seats, everybody = _Seats(self._open), [*self.order, applicant]
        has_seats = len(everybody) <= seats.max_jobs.sum()
        has_bytes = sum(a.num_bytes for a in everybody) <= seats.usable_bytes.sum()
        if not (has_seats and has_bytes and self._seatings_left > 0):
            return False
        limit = min(MAX_SEATINGS // 3, self._seatings_left)
        jobs = sorted(everybody, key=lambda a: (-a.num_bytes, a.job))
        found, num_seatings = seats.pack(jobs, self._seats, limit)
        self._seatings_left -= num_seatings
        if found:
            self._taken = seats
        return found

    def _why_not(self, applicant: Applicant) -> Reason:
        """In the words of admission on one device where there is one replica only."""
        if len(self._open) == 1:
            held_bytes = sum(a.num_bytes for a in self.order)
            reason = DeviceRoom(self._open[0].budget, list(self.order), held_bytes).take(applicant)
            assert reason is not None
            return reason
        if not self._open:
            return Reason(ReasonCode.NO_PLACE, "waits for a replica: none takes jobs now")
        taken = self._taken
        left = (taken.usable_bytes - taken.held_bytes)[taken.num_jobs < taken.max_jobs]
        if not len(left):
            others = f"{counted(len(self.order), 'job')} on {counted(len(self._open), 'replica')}"
            text = f"waits for a place: there is none beside {others}"
            return Reason(ReasonCode.NO_PLACE, text)
        most, needs = size(int(left.max())), size(applicant.num_bytes)
        text = f"waits for memory: it needs {needs}, and no replica with a place has more than {most} left"
        return Reason(ReasonCode.NO_MEMORY_NOW, text)


def _least(values: npt.NDArray[np.float64], among: npt.NDArray[np.bool_]) -> int:
    """The first place with the least value; values may be infinite."""
    places = np.flatnonzero(among)
    return int(places[values[places].argmin()])
