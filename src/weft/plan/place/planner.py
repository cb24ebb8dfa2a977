"""Places jobs over replicas at a step boundary; a pure function of what it is given, in any order.

Rules, in order:
1. Memory and seats of a replica are never exceeded; `plan.admit.Budget` decides what fits together.
2. The running jobs are those that admission would choose on one device: the same walk by priority, fair share and
   arrival, with the replicas' seats and memory pooled (`pool.py`). With one replica it is `admit` itself.
3. No replica is idle while a waiting job fits there, nor while another has two jobs of which one would gain there.
4. Ends are level, and
5. a job that has a seat moves only for a gain that is worth it (`balance.py`).

Bounds on the makespan of the jobs that train, where memory and seats do not bind and no job sits anywhere (LPT):
4/3 - 1/(3m) times the best for m alike replicas (Graham 1969), 2m/(m + 1) for unlike ones (Gonzalez, Ibarra and Sahni
1977). Where jobs sit already, on alike replicas, each with more than `move_s` seconds left:

    makespan ≤ (2 - 1/m) · best + 3 · move_s

Let L be the end of the last replica after step 2 of `balance.py`, p a job on it, l the first end, and W all work. If
the job is alone, L = p is the best. If not, its move gains no more than `move_s`: L - l - p ≤ move_s. With
(m - 1) l ≤ W - L that is L ≤ W/m + (1 - 1/m) (p + move_s), and neither W/m nor p is above the best. Step 3 gives back
at most `move_s`, and once more if all jobs return; step 4 gives nothing back. With waiting jobs, this holds for ends
after `least_s`, before which nothing is levelled.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from weft.errors import PlanError
from weft.plan.admit import Share, admit_to
from weft.plan.place.balance import Balance
from weft.plan.place.pool import PooledRoom
from weft.plan.place.types import MOVE_S, Candidate, JobPlacement, Move, Replica, least_s, present_seats

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
    _check(replicas, move_s)
    jobs, machines = sorted(candidates, key=lambda c: c.job), sorted(replicas, key=lambda r: r.name)
    seated = present_seats(jobs, machines)
    applicants = [c.applicant for c in jobs]
    waiting = [a for a in applicants if a.job not in seated]
    running = [a for a in applicants if a.job in seated]
    takers = [replica for replica in machines if not replica.is_draining]
    floor_s = least_s(jobs, machines)
    seats, balance = seated, Balance([], takers, {}, move_s)
    for walk in itertools.count():
        room = PooledRoom(machines, applicants, seats)
        admission = admit_to(room, waiting, running, shares)
        found = room.replica_of
        # This ends: a walk keeps all seats, or admits a job that was waiting.
        if walk and found == seats:
            break
        balance = Balance([c for c in jobs if c.job in found], takers, found, move_s, floor_s)
        if walk < MAX_LEVELS:
            balance.level()
        balance.fill_and_return()
        seats = balance.replica_of
    moves = (Move(job, seated[job], seats[job]) for job in sorted(seats) if seated.get(job, seats[job]) != seats[job])
    return JobPlacement(admission, seats, tuple(moves), balance.makespan_s)


def _check(replicas: Sequence[Replica], move_s: float) -> None:
    if not 0 <= move_s < math.inf:
        raise PlanError(f"is {move_s:g}; it must be at least 0 and a number.", where="move_s")
    names = set()
    for replica in replicas:
        if replica.name in names:
            raise PlanError("is given twice; every replica has its own name.", where=replica.name)
        names.add(replica.name)
