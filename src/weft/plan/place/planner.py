"""Places jobs over replicas at a step boundary; a pure function of what it is given, in any order.

Rules, in order:
1. Memory and seats of a replica are never exceeded; `plan.admit.Budget` decides what fits together.
2. The running jobs are those that admission would choose on one device: the same walk by priority, fair share and
   arrival, with the replicas' seats and memory pooled (`pool.py`). With one replica it is `admit` itself.
3. No replica is idle while a waiting job fits there, nor while another has two jobs of which one would gain there.
4. Ends are level, and
5. a job that has a seat moves only for a gain that is worth it (`Balance`).

Bounds on the makespan of the jobs that train, where memory and seats do not bind and no job sits anywhere (LPT):
4/3 - 1/(3m) times the best for m alike replicas (Graham 1969), 2m/(m + 1) for unlike ones (Gonzalez, Ibarra and Sahni
1977). Where jobs sit already, on alike replicas, each with more than `move_s` seconds left:

    makespan ≤ (2 - 1/m) · best + 3 · move_s

Let L be the end of the last replica after step 2 of `Balance`, p a job on it, l the first end, and W all work. If
the job is alone, L = p is the best. If not, its move gains no more than `move_s`: L - l - p ≤ move_s. With
(m - 1) l ≤ W - L that is L ≤ W/m + (1 - 1/m) (p + move_s), and neither W/m nor p is above the best. Step 3 gives back
at most `move_s`, and once more if all jobs return; step 4 gives nothing back. With waiting jobs, this holds for ends
after `least_s`, before which nothing is levelled.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from weft.plan.admit import Share, admit_to
from weft.plan.level import Levelling
from weft.plan.place.pool import (
    MOVE_S,
    Candidate,
    JobPlacement,
    Move,
    PooledRoom,
    Replica,
    least_s,
    or_inf,
    present_seats,
    wanted_seats,
)

MAX_LEVELS = 8
"""Times that ends are levelled in one call. Levelling may make room for a waiting job; then the walk is repeated."""


def assign_jobs(
    candidates: Sequence[Candidate],
    replicas: Sequence[Replica],
    shares: Mapping[str, Share] | None = None,
    *,
    move_s: float = MOVE_S,
) -> JobPlacement:
    """Assigns jobs to replicas from this step boundary on. `move_s`: seconds that a move must save."""
    jobs, machines = sorted(candidates, key=lambda c: c.job), sorted(replicas, key=lambda r: r.name)
    seated = present_seats(jobs, machines)
    applicants = [c.applicant for c in jobs]
    waiting = [a for a in applicants if a.job not in seated]
    running = [a for a in applicants if a.job in seated]
    takers = [replica for replica in machines if not replica.is_draining]
    floor_s = least_s(jobs, machines)
    wanted = wanted_seats(jobs, machines)
    seats, balance = seated, Balance([], takers, {}, move_s)
    for walk in itertools.count():
        room = PooledRoom(machines, applicants, seats)
        admission = admit_to(room, waiting, running, shares)
        found = room.replica_of
        # This ends: a walk keeps all seats, or admits a job that was waiting.
        if walk and found == seats:
            break
        training = [replace(c, replica=wanted.get(c.job)) for c in jobs if c.job in found]
        balance = Balance(training, takers, found, move_s, floor_s)
        if walk < MAX_LEVELS:
            balance.level()
        balance.fill_and_return()
        seats = balance.replica_of
    moves = (Move(job, seated[job], seats[job]) for job in sorted(seats) if seated.get(job, seats[job]) != seats[job])
    return JobPlacement(admission, seats, tuple(moves), balance.makespan_s)


MAX_ROUNDS = 4
"""Repetitions of steps 2 and 3."""
ROUNDING = 1e-9


class Balance(Levelling):
    """Levels the ends of replicas within memory and seats, with few moves.

    With a seat within memory for every job that trains (`plan/level.py` has the problem and steps 1 and 2):
    1. Newcomers go where they end soonest; if that leaves one without a seat, all keep the seats of admission's walk.
    2. The best change of the replica that ends last, as long as there is one.
    3. Jobs return to their seats as long as the makespan stays within `move_s` of the best found; if all changes
       together gain no more than `move_s`, all return.
    4. An empty replica takes a job from a replica with two or more, if the later of both then ends sooner by more than
       `move_s` (for a newcomer: at all).
    """

    def __init__(
        self,
        jobs: Sequence[Candidate],
        replicas: Sequence[Replica],
        seats: Mapping[str, str],
        move_s: float,
        floor_s: float = 0.0,
    ) -> None:
        """`replicas`: those that take jobs; `seats`: a replica for every job, within memory."""
        index = {replica.name: i for i, replica in enumerate(replicas)}
        self._jobs, self._replicas = jobs, replicas
        seconds, speed = np.array([c.seconds_left for c in jobs], float), np.array([r.speed for r in replicas], float)
        at = np.array([index[seats[c.job]] for c in jobs], dtype=np.int64)
        homes = np.array([index.get(c.replica or "", -1) for c in jobs], dtype=np.int64)
        super().__init__(seconds[:, None] / speed, at, homes, move_s)
        self.bytes = np.array([c.applicant.num_bytes for c in jobs], dtype=float)
        self.usable = np.array([or_inf(r.budget.usable_bytes) for r in replicas])
        self.max_jobs = np.array([or_inf(r.budget.max_jobs) for r in replicas])
        self.floor_s = floor_s
        self.count()

    @property
    def replica_of(self) -> dict[str, str]:
        return {c.job: self._replicas[at].name for c, at in zip(self._jobs, self.at, strict=True)}

    @property
    def _end_s(self) -> float:
        return max(self.makespan_s, self.floor_s)

    def level(self) -> None:
        self.seat_newcomers()
        self._send_home(np.inf)
        before, start_s = self.at.copy(), self._end_s
        for _ in range(MAX_ROUNDS):
            last_time = self.at.copy()
            self.improve()
            # Returned jobs leave memory that may allow more.
            self._send_home(self._end_s + self.move_s)
            if (self.at == last_time).all():
                break
        is_moved = bool(((self.at != before) & (self.homes >= 0)).any())
        if is_moved and start_s - self._end_s <= self.move_s:
            self.at = before
            self.count()

    def fill_and_return(self) -> None:
        """Step 4; then moves that it or admission has made useless are taken back. It ends: every round gives a job to
        an empty replica, and returning leaves none empty."""
        while self._fill_idle():
            self._undo_useless_moves()
        self._undo_useless_moves()

    def _away(self) -> list[int]:
        return [int(job) for job in np.flatnonzero((self.homes >= 0) & (self.homes != self.at))]

    def _try(self, change: Mapping[int, int], limit_s: float) -> bool:
        """Makes a change if it is within memory and seats and no replica ends after the limit."""
        before = self.at.copy()
        self.apply(change)
        is_within = bool((self.held <= self.usable).all() and (self.taken <= self.max_jobs).all())
        if is_within and self.makespan_s <= limit_s:
            return True
        self.at = before
        self.count()
        return False

    def _send_home(self, limit_s: float) -> None:
        """Takes changes back within the limit: a job alone, or in exchange for one that may move there."""
        for job in self._away():
            home, here = int(self.homes[job]), int(self.at[job])
            others = [int(k) for k in np.flatnonzero(self.at == home) if self.homes[k] in (-1, here)]
            for change in ({job: home}, *({job: home, k: here} for k in others)):
                if self._try(change, limit_s):
                    break

    def _undo_useless_moves(self) -> None:
        """Returns jobs that gain nothing where they are, unless they are alone there."""
        limit_s = self._end_s * (1 + ROUNDING)
        while any(self.taken[self.at[j]] > 1 and self._try({j: int(self.homes[j])}, limit_s) for j in self._away()):
            pass

    def _fill_idle(self) -> bool:
        """Gives a job to every empty replica that would gain by one; False if none was filled."""
        idle, floor_s = np.flatnonzero(self.taken == 0), self.floor_s
        self.floor_s = 0.0
        for replica in idle.tolist():
            best: tuple[float, dict[int, int]] = (0.0, {})
            for source in np.flatnonzero(self.taken >= 2).tolist():
                jobs = self.on(source)
                there, here = np.full_like(jobs, replica), np.full_like(jobs, source)
                extra = self.cost_s(jobs, there) - self.cost_s(jobs, here)
                mine, theirs = self.load[source] - self.seconds[jobs, source], self.seconds[jobs, replica]
                gains = np.where(
                    self.bytes[jobs] > self.usable[replica], -np.inf, self.gains(source, mine, theirs, extra)
                )
                most = int(gains.argmax())
                if gains[most] > best[0]:
                    best = (float(gains[most]), {int(jobs[most]): replica})
            self.apply(best[1])
        self.floor_s = floor_s
        return int((self.taken == 0).sum()) < len(idle)
