"""Levels the ends of replicas: the one routine for homes of jobs, placement over replicas, and even buckets.

Problem: min max_k Σ seconds of the jobs on replica k, each of which must hold its jobs; a job that has a seat moves
only if that saves `move_s` seconds. NP-hard (makespan scheduling).

Method, with a bounded number of changes, so that the result does not depend on the machine's speed:
1. Jobs without a seat, the longest first, each go where they end soonest (LPT).
2. While a job of the replica that ends last can move to another, or be exchanged, or all jobs of both, if they are few,
   can be divided again, so that the later of both ends sooner by more than `move_s` for every seated job that moves:
   the best such change.
Deterministic, ties to the first job and replica. Tests compare with every choice.

Homes are for jobs whose samples may not be divided, in plans and in runs alike. One global batch per job counts, not
the work left: replicas run equally many global batches of each job before they synchronise.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Job = TypeVar("Job", bound=Hashable)
LEAST_GAIN = 0.1
"""Share of the slowest replica's time that the move of a job to another home must save."""
MAX_CHANGES = 2000
"""Changes of one call; a millisecond each for 1,000 jobs on 64 replicas."""
MOST_SPLIT = 12
"""Jobs of two replicas up to which all 2¹² divisions are tried."""
ROUNDING = 1e-6
"""Share of the makespan below which a gain does not count."""
CLOSE = 1.0002
"""Ratio to the lower bound at which the search ends."""


@dataclass(frozen=True)
class PlannedReplicas:
    holds: tuple[int, ...]
    """Tokens of the longest sample that each replica holds, which is also its longest chunk."""
    home_s: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Seconds of a global batch of each job with a home, by replica; infinite where the replica cannot hold it."""

    @property
    def homes(self) -> dict[str, int]:
        return choose_homes(self.home_s)


def choose_homes(seconds: Mapping[Job, Sequence[float]], before: Mapping[Job, int] | None = None) -> dict[Job, int]:
    """Returns the replica of each job. `seconds` are those of a job's global batch on each replica, infinite where it
    does not fit; every job fits somewhere. `before`: present homes."""
    if not seconds:
        return {}
    seconds_JK = np.array(list(seconds.values()), dtype=float)
    seats = [(before or {}).get(job, -1) for job in seconds]
    homes = np.array([k if k >= 0 and np.isfinite(own[k]) else -1 for k, own in zip(seats, seconds_JK, strict=True)])
    level = Levelling(seconds_JK, homes.copy(), homes)
    level.seat_newcomers()
    level.move_s = level.most_cost_s = LEAST_GAIN * level.makespan_s
    level.improve()
    return dict(zip(seconds, level.at.tolist(), strict=True))


class Levelling:
    def __init__(self, seconds_JK: Floats, at: Ints, homes: Ints, move_s: float = 0.0) -> None:
        """`at`: replica of each job; `homes`: where it is seated now; -1 for none, so that it moves freely."""
        num_jobs, num_replicas = seconds_JK.shape
        self.seconds, self.at, self.homes, self.move_s = seconds_JK, at, homes, move_s
        self.bytes = np.zeros(num_jobs)
        self.usable, self.max_jobs = np.full(num_replicas, np.inf), np.full(num_replicas, np.inf)
        self.floor_s = 0.0
        """Time in seconds before which all ends count as equal."""
        self.most_cost_s = np.inf
        """Largest cost, in seconds, of the moves of one change."""
        self.count()

    @property
    def makespan_s(self) -> float:
        return float(self.load.max(initial=0.0))

    def count(self) -> None:
        """Sums up what each replica has, from scratch: running sums would drift."""
        num, seated = len(self.usable), np.flatnonzero(self.at >= 0)
        at = self.at[seated]
        # Of no job at all, bincount gives whole numbers.
        self.load = np.bincount(at, self.seconds[seated, at], num).astype(float)
        self.held = np.bincount(at, self.bytes[seated], num).astype(float)
        self.taken = np.bincount(at, minlength=num).astype(float)

    def on(self, replica: int) -> Ints:
        """The jobs of a replica, the shortest first: of equal gains, it is the one to move."""
        jobs = np.flatnonzero(self.at == replica)
        return jobs[np.argsort(self.seconds[jobs, replica], kind="stable")]

    def seat_newcomers(self) -> bool:
        """Seats all jobs without a home (LPT); without a change, False if there is no room for one of them."""
        before, new = self.at.copy(), np.flatnonzero(self.homes < 0)
        self.at[new] = -1
        self.count()
        for job in new[np.argsort(-self.seconds[new].min(axis=1, initial=np.inf), kind="stable")].tolist():
            ends = np.where(self._has_room(self.bytes[job], 1), self.load + self.seconds[job], np.inf)
            taker = int(ends.argmin())
            if not np.isfinite(ends[taker]):
                self.at = before
                self.count()
                return False
            self.at[job] = taker
            self.load[taker] = ends[taker]
            self.held[taker] += self.bytes[job]
            self.taken[taker] += 1
        self.count()
        return True

    def improve(self) -> None:
        """Makes the best change, as long as there is one."""
        for _ in range(MAX_CHANGES):
            if self.makespan_s <= CLOSE * self.floor_s:
                return
            last = int(self.load.argmax())
            change = self._best_move(last) or self._best_exchange(last) or self._best_split(last)
            if change is None:
                return
            self.apply(change)

    def apply(self, change: Mapping[int, int]) -> None:
        for job, replica in change.items():
            self.at[job] = replica
        self.count()

    def gains(self, last: int, mine: Floats, theirs: Floats, extra: Floats) -> Floats:
        """The seconds by which the later of two replicas ends sooner, less the cost of the change."""
        now = self.load[last]
        gains = now - np.maximum(np.maximum(mine, theirs), self.floor_s)
        # A change that saves a move must still gain something, or two changes could alternate for ever.
        return np.asarray(gains - np.clip(extra, 0.0, self.most_cost_s) - ROUNDING * now)

    def cost_s(self, jobs: Ints, replicas: Ints) -> Floats:
        homes = self.homes[jobs]
        return np.where((homes >= 0) & (homes != replicas), self.move_s, 0.0)

    def _has_room(self, num_bytes: Floats | float, num_jobs: int) -> npt.NDArray[np.bool_]:
        return (self.held + num_bytes <= self.usable) & (self.taken + num_jobs <= self.max_jobs)

    def _best_move(self, last: int) -> dict[int, int] | None:
        jobs, replicas = self.on(last), np.arange(len(self.load))[None, :]
        mine = (self.load[last] - self.seconds[jobs, last])[:, None]
        theirs = self.load + self.seconds[jobs]
        extra = self.cost_s(jobs[:, None], replicas) - self.cost_s(jobs, np.full_like(jobs, last))[:, None]
        gains = self.gains(last, mine, theirs, extra)
        gains[~self._has_room(self.bytes[jobs][:, None], 1)] = -np.inf
        gains[:, last] = -np.inf
        best = np.unravel_index(int(gains.argmax()), gains.shape)
        return {int(jobs[best[0]]): int(best[1])} if gains[best] > 0 else None

    def _best_exchange(self, last: int) -> dict[int, int] | None:
        jobs, others = self.on(last), np.flatnonzero(self.at != last)
        if not len(others):
            return None
        at = self.at[others]
        mine = self.load[last] - self.seconds[jobs, last][:, None] + self.seconds[others, last][None, :]
        theirs = (self.load[at] - self.seconds[others, at])[None, :] + self.seconds[jobs[:, None], at[None, :]]
        now = self.cost_s(jobs, np.full_like(jobs, last))[:, None] + self.cost_s(others, at)[None, :]
        then = self.cost_s(jobs[:, None], at[None, :]) + self.cost_s(others, np.full_like(others, last))[None, :]
        gains = self.gains(last, mine, theirs, then - now)
        fewer_bytes = self.bytes[jobs][:, None] - self.bytes[others][None, :]
        fits = (self.held[last] - fewer_bytes <= self.usable[last]) & (
            self.held[at][None, :] + fewer_bytes <= self.usable[at][None, :]
        )
        gains[~fits] = -np.inf
        best = np.unravel_index(int(gains.argmax()), gains.shape)
        if not gains[best] > 0:
            return None
        job, other = int(jobs[best[0]]), int(others[best[1]])
        return {job: int(self.at[other]), other: last}

    def _best_split(self, last: int) -> dict[int, int] | None:
        """The best division of the jobs of the last replica and of another, if they are few."""
        best: tuple[float, dict[int, int]] = (0.0, {})
        own = self.on(last)
        for other in np.flatnonzero(self.taken + len(own) <= MOST_SPLIT).tolist():
            if other == last:
                continue
            jobs = np.concatenate([own, self.on(other)])
            stays = _subsets(len(jobs))
            mine = np.where(stays > 0, self.seconds[jobs, last], 0.0).sum(axis=1)
            theirs = np.where(stays > 0, 0.0, self.seconds[jobs, other]).sum(axis=1)
            num_bytes, num = stays @ self.bytes[jobs], stays.sum(axis=1)
            their_bytes = self.held[last] + self.held[other] - num_bytes
            fits = (num_bytes <= self.usable[last]) & (num <= self.max_jobs[last])
            fits &= (their_bytes <= self.usable[other]) & (len(jobs) - num <= self.max_jobs[other])
            costs = [self.cost_s(jobs, np.full_like(jobs, replica)) for replica in (last, other)]
            extra = stays @ costs[0] + (1 - stays) @ costs[1] - self.cost_s(jobs, self.at[jobs]).sum()
            gains = np.where(fits, self.gains(last, mine, theirs, extra), -np.inf)
            most = int(gains.argmax())
            if gains[most] > best[0]:
                replicas = np.where(stays[most] > 0, last, other)
                best = (float(gains[most]), dict(zip(jobs.tolist(), replicas.tolist(), strict=True)))
        return best[1] or None


@functools.cache
def _subsets(num_jobs: int) -> Floats:
    return ((np.arange(2**num_jobs)[:, None] >> np.arange(num_jobs)) & 1).astype(float)
