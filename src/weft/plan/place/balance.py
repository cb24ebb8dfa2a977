"""Levels the ends of replicas: newcomers by LPT, then moves and changes of places while the last replica ends sooner.

Problem: the jobs that train are given, each with a seat that is within memory. Find seats with

    min  max over replicas of  Σ seconds_left / speed      s.t.  memory and seats of every replica

where a job that sits somewhere moves only if that is worth `move_s` seconds. NP-hard (makespan scheduling).

Method, with a bounded number of changes, so that the answer does not depend on the machine's speed:
1. Newcomers, the longest first, each go to the replica with room that would end soonest with them (LPT). If that leaves
   one of them without a seat, all keep the seats that admission's walk found.
2. While a job of the replica that ends last can go over to another, or change places with one there, or all jobs of
   both, if they are few, can be dealt out anew, so that the later of both ends sooner by more than `move_s` for every
   job that moves: the best such change. Newcomers move freely.
3. Jobs go back where they sat as long as the makespan stays within `move_s` of the best found; if all changes together
   gain no more than `move_s`, all go back.
4. A replica left with no job takes one from a replica with two or more, if the later of both then ends sooner by more
   than `move_s` (for a newcomer: at all).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from weft.plan.place.types import Candidate, Replica, or_inf

Floats = npt.NDArray[np.float64]
MAX_CHANGES = 2000
"""Moves and exchanges of one call; a millisecond each for 1,000 jobs on 64 replicas."""
MOST_SPLIT = 12
"""Jobs of two replicas up to which all 2¹² ways to deal them out are tried."""
MAX_ROUNDS = 4
"""Of steps 2 and 3."""
LEAST_GAIN = 1e-6
"""Of the makespan; below it a change is not worth looking at."""
CLOSE = 1.0002
"""So near to what all work takes on all replicas, nothing more is tried."""
ROUNDING = 1e-9


class Balance:
    """Jobs on their replicas, and what changes would gain."""

    def __init__(
        self, jobs: Sequence[Candidate], replicas: Sequence[Replica], seats: Mapping[str, str], move_s: float
    ) -> None:
        """`replicas`: those that take jobs; `seats`: a replica for every job, within memory."""
        place = {replica.name: i for i, replica in enumerate(replicas)}
        self._jobs, self._replicas, self._move_s = jobs, replicas, move_s
        self._seconds = np.array([c.seconds_left for c in jobs], dtype=float)
        self._bytes = np.array([c.applicant.num_bytes for c in jobs], dtype=float)
        self._home = np.array([place.get(c.replica or "", -1) for c in jobs], dtype=int)
        """Where a job sits now; -1: nowhere, so that it moves freely."""
        self._speed = np.array([r.speed for r in replicas], dtype=float)
        self._usable = np.array([or_inf(r.budget.usable_bytes) for r in replicas])
        self._max_jobs = np.array([or_inf(r.budget.max_jobs) for r in replicas])
        self._at = np.array([place[seats[c.job]] for c in jobs], dtype=int)
        self._count()

    @property
    def replica_of(self) -> dict[str, str]:
        """The replica of every job."""
        return {c.job: self._replicas[at].name for c, at in zip(self._jobs, self._at, strict=True)}

    @property
    def makespan_s(self) -> float:
        """The latest end."""
        return float(self._ends().max(initial=0.0))

    def level(self, floor_s: float) -> None:
        """Steps 1 to 3; an end before `floor_s` counts as one at `floor_s`."""
        self._deal_newcomers()
        self._send_home(np.inf)
        before, start_s = self._at.copy(), max(self.makespan_s, floor_s)
        for _ in range(MAX_ROUNDS):
            last_time = self._at.copy()
            self._improve(floor_s)
            # Who goes home leaves memory that may allow more.
            self._send_home(max(self.makespan_s, floor_s) + self._move_s)
            if (self._at == last_time).all():
                break
        is_moved = bool(((self._at != before) & (self._home >= 0)).any())
        if is_moved and start_s - max(self.makespan_s, floor_s) <= self._move_s:
            self._at = before
            self._count()

    def settle(self, floor_s: float) -> None:
        """Step 4, and moves that this, or who was admitted, has left without a use are taken back.

        That ends: every round gives a job to a replica that had none, and taking back leaves none without.
        """
        while self._fill_idle():
            self._undo_useless_moves(floor_s)
        self._undo_useless_moves(floor_s)

    def _count(self) -> None:
        num = len(self._replicas)
        self._load = np.bincount(self._at, self._seconds, num)
        self._held = np.bincount(self._at, self._bytes, num)
        self._taken = np.bincount(self._at, minlength=num).astype(float)

    def _on(self, place: int) -> npt.NDArray[np.int64]:
        """The jobs of a replica, the shortest first: of those that gain as much, it is the one to move."""
        jobs = np.flatnonzero(self._at == place)
        return jobs[np.argsort(self._seconds[jobs], kind="stable")]

    def _ends(self) -> Floats:
        return np.asarray(self._load / self._speed)

    def _deal_newcomers(self) -> None:
        """LPT: the longest first, each where it ends soonest."""
        new = np.flatnonzero(self._home < 0)
        before = self._at.copy()
        self._add(new, -1)
        for job in sorted(new.tolist(), key=lambda job: (-self._seconds[job], job)):
            ends = (self._load + self._seconds[job]) / self._speed
            ends[~self._has_room(self._bytes[job], 1)] = np.inf
            place = int(ends.argmin())
            if not np.isfinite(ends[place]):
                self._at = before
                self._count()
                return
            self._at[job] = place
            self._add(job, 1)

    def _add(self, jobs: npt.NDArray[np.int64] | int, sign: int) -> None:
        """Counts jobs in, or out, where they are."""
        np.add.at(self._load, self._at[jobs], sign * self._seconds[jobs])
        np.add.at(self._held, self._at[jobs], sign * self._bytes[jobs])
        np.add.at(self._taken, self._at[jobs], sign)

    def _has_room(self, num_bytes: Floats | float, num_jobs: int) -> npt.NDArray[np.bool_]:
        """On every replica."""
        return (self._held + num_bytes <= self._usable) & (self._taken + num_jobs <= self._max_jobs)

    def _improve(self, floor_s: float) -> None:
        for _ in range(MAX_CHANGES):
            if self.makespan_s <= CLOSE * floor_s:
                return
            last = int(self._ends().argmax())
            change = self._best_move(last, floor_s) or self._best_exchange(last, floor_s)
            change = change or self._best_split(last, floor_s)
            if change is None:
                return
            self._apply(change)

    def _apply(self, change: Mapping[int, int]) -> None:
        for job, place in change.items():
            self._at[job] = place
        # Counted from nothing: sums that are only ever added to and taken from would drift.
        self._count()

    def _cost_s(self, jobs: npt.NDArray[np.int64], places: npt.NDArray[np.int64]) -> Floats:
        """What it costs that these jobs sit at these places."""
        home = self._home[jobs]
        return np.where((home >= 0) & (home != places), self._move_s, 0.0)

    def _best_move(self, last: int, floor_s: float) -> dict[int, int] | None:
        """The job of the last replica that gains most by going over to another."""
        jobs = self._on(last)
        seconds, places = self._seconds[jobs][:, None], np.arange(len(self._replicas))[None, :]
        mine = (self._load[last] - seconds) / self._speed[last]
        theirs = (self._load + seconds) / self._speed
        extra = self._cost_s(jobs[:, None], places) - self._cost_s(jobs, np.full_like(jobs, last))[:, None]
        gains = self._gains(last, mine, theirs, extra, floor_s)
        gains[~self._has_room(self._bytes[jobs][:, None], 1)] = -np.inf
        gains[:, last] = -np.inf
        found = np.unravel_index(int(gains.argmax()), gains.shape)
        return {int(jobs[found[0]]): int(found[1])} if gains[found] > 0 else None

    def _best_exchange(self, last: int, floor_s: float) -> dict[int, int] | None:
        """The job of the last replica that gains most by changing places with one of another."""
        jobs, others = self._on(last), np.flatnonzero(self._at != last)
        if not len(others):
            return None
        at = self._at[others]
        less = self._seconds[jobs][:, None] - self._seconds[others][None, :]
        mine = (self._load[last] - less) / self._speed[last]
        theirs = (self._load[at][None, :] + less) / self._speed[at][None, :]
        now = self._cost_s(jobs, np.full_like(jobs, last))[:, None] + self._cost_s(others, at)[None, :]
        then = self._cost_s(jobs[:, None], at[None, :]) + self._cost_s(others, np.full_like(others, last))[None, :]
        gains = self._gains(last, mine, theirs, then - now, floor_s)
        fewer_bytes = self._bytes[jobs][:, None] - self._bytes[others][None, :]
        fits = (self._held[last] - fewer_bytes <= self._usable[last]) & (
            self._held[at][None, :] + fewer_bytes <= self._usable[at][None, :]
        )
        gains[~fits] = -np.inf
        found = np.unravel_index(int(gains.argmax()), gains.shape)
        if not gains[found] > 0:
            return None
        job, other = int(jobs[found[0]]), int(others[found[1]])
        return {job: int(self._at[other]), other: last}

    def _best_split(self, last: int, floor_s: float) -> dict[int, int] | None:
        """The jobs of the last replica and of another, if they are few, dealt out between both in the best way."""
        best: tuple[float, dict[int, int]] = (0.0, {})
        mine = self._on(last)
        for other in np.flatnonzero(self._taken + len(mine) <= MOST_SPLIT):
            if other == last:
                continue
            jobs = np.concatenate([mine, self._on(int(other))])
            stays = _subsets(len(jobs))
            seconds, num_bytes, num = (stays @ self._seconds[jobs], stays @ self._bytes[jobs], stays.sum(axis=1))
            theirs = self._load[last] + self._load[other] - seconds
            their_bytes = self._held[last] + self._held[other] - num_bytes
            fits = (num_bytes <= self._usable[last]) & (num <= self._max_jobs[last])
            fits &= (their_bytes <= self._usable[other]) & (len(jobs) - num <= self._max_jobs[other])
            costs = [self._cost_s(jobs, np.full_like(jobs, place)) for place in (last, int(other))]
            extra = stays @ costs[0] + (1 - stays) @ costs[1] - self._cost_s(jobs, self._at[jobs]).sum()
            ends = seconds / self._speed[last], theirs / self._speed[other]
            gains = np.where(fits, self._gains(last, *ends, extra, floor_s), -np.inf)
            most = int(gains.argmax())
            if gains[most] > best[0]:
                places = np.where(stays[most] > 0, last, other)
                best = (float(gains[most]), dict(zip(jobs.tolist(), places.tolist(), strict=True)))
        return best[1] or None

    def _gains(self, last: int, mine: Floats, theirs: Floats, extra: Floats, floor_s: float) -> Floats:
        """How much sooner the later of two replicas ends, less what the change costs."""
        now = self._load[last] / self._speed[last]
        gains = now - np.maximum(np.maximum(mine, theirs), floor_s)
        # A change that saves a move must still gain something, or two of them could take turns for ever.
        return np.asarray(gains - np.maximum(extra, 0.0) - LEAST_GAIN * now)

    def _away(self) -> list[int]:
        """Jobs that sit elsewhere now, on a replica that takes jobs."""
        return [int(job) for job in np.flatnonzero((self._home >= 0) & (self._home != self._at))]

    def _try(self, change: Mapping[int, int], limit_s: float) -> bool:
        """Makes a change if it is within memory and seats and no replica ends after the limit."""
        before = self._at.copy()
        self._apply(change)
        is_within = bool((self._held <= self._usable).all() and (self._taken <= self._max_jobs).all())
        if is_within and self.makespan_s <= limit_s:
            return True
        self._at = before
        self._count()
        return False

    def _send_home(self, limit_s: float) -> None:
        """Takes changes back as far as the limit allows: a job alone, or in exchange for one that may go there."""
        for job in self._away():
            home, here = int(self._home[job]), int(self._at[job])
            others = [int(k) for k in np.flatnonzero(self._at == home) if self._home[k] in (-1, here)]
            for change in ({job: home}, *({job: home, k: here} for k in others)):
                if self._try(change, limit_s):
                    break

    def _undo_useless_moves(self, floor_s: float) -> None:
        """Sends jobs home that gain nothing where they are, unless they are alone there."""
        limit_s = max(self.makespan_s, floor_s) * (1 + ROUNDING)
        while any(self._taken[self._at[j]] > 1 and self._try({j: int(self._home[j])}, limit_s) for j in self._away()):
            pass

    def _fill_idle(self) -> bool:
        """Gives a job to every replica that has none and would gain by one; whether there was such."""
        idle = np.flatnonzero(self._taken == 0)
        for place in idle:
            best: tuple[float, dict[int, int]] = (0.0, {})
            for source in np.flatnonzero(self._taken >= 2):
                jobs = self._on(int(source))
                seconds = self._seconds[jobs]
                mine = (self._load[source] - seconds) / self._speed[source]
                there, here = np.full_like(jobs, place), np.full_like(jobs, source)
                extra = self._cost_s(jobs, there) - self._cost_s(jobs, here)
                gains = self._gains(int(source), mine, seconds / self._speed[place], extra, 0.0)
                gains[self._bytes[jobs] > self._usable[place]] = -np.inf
                most = int(gains.argmax())
                if gains[most] > best[0]:
                    best = (float(gains[most]), {int(jobs[most]): int(place)})
            self._apply(best[1])
        return int((self._taken == 0).sum()) < len(idle)


@functools.cache
def _subsets(num_jobs: int) -> Floats:
    """A row for every subset of so many jobs: 1 for those in it."""
    return ((np.arange(2**num_jobs)[:, None] >> np.arange(num_jobs)) & 1).astype(float)
