"""Checks any placement independently of the planner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from weft.plan.place.pool import MOVE_S, Candidate, JobPlacement, Move, Replica, least_s, present_seats

ROUNDING = 1e-10
"""Relative difference between sums of seconds in different orders."""


def violations(
    placement: JobPlacement, candidates: Sequence[Candidate], replicas: Sequence[Replica], *, move_s: float = MOVE_S
) -> list[str]:
    """The faults of a placement of these jobs on these replicas; empty if it is valid.

    Checked: every job has one answer and trains on one replica that takes jobs; memory and seats; no job waits that
    fits beside those of its own priority or a higher one; no replica is idle while a job of another gains there; moves
    are the actual ones and each is of use; the makespan follows from the seats.
    """
    found = [*_unanswered(placement, candidates), *_unknown(placement, replicas)]
    if found:
        return found
    seats = _Seating(placement, candidates, replicas)
    found += [*seats.overfull(), *seats.misreported()]
    return found or [*seats.held_back(), *seats.idle(move_s), *seats.useless()]


def _unanswered(placement: JobPlacement, candidates: Sequence[Candidate]) -> Iterator[str]:
    admission = placement.admission
    held = [one.job for one in (*admission.preempt, *admission.wait, *admission.refuse)]
    answers = Counter([*admission.start, *admission.keep, *held])
    known = {c.job for c in candidates}
    for job in sorted(answers.keys() | known):
        if job not in known:
            yield f"{job} has an answer and is no candidate."
        elif answers[job] != 1:
            yield f"{job} has {answers[job]} answers; it should have one."
    for job in sorted({*admission.start, *admission.keep} ^ placement.replica_of.keys()):
        yield f"{job} is admitted and has no replica, or has one and is not admitted."


def _unknown(placement: JobPlacement, replicas: Sequence[Replica]) -> Iterator[str]:
    takers = {replica.name: not replica.is_draining for replica in replicas}
    for job, name in sorted(placement.replica_of.items()):
        if not takers.get(name, False):
            yield f"{job} is on {name}, which {'is draining' if name in takers else 'is not there'}."


class _Seating:
    def __init__(self, placement: JobPlacement, candidates: Sequence[Candidate], replicas: Sequence[Replica]) -> None:
        self.placement = placement
        self.job = {c.job: c for c in candidates}
        self.replica = {r.name: r for r in sorted(replicas, key=lambda r: r.name) if not r.is_draining}
        self.on: dict[str, list[Candidate]] = {name: [] for name in self.replica}
        for job in sorted(placement.replica_of):
            self.on[placement.replica_of[job]].append(self.job[job])
        self.seated = present_seats(candidates, replicas)
        self.least_s = least_s(candidates, replicas)

    def fits(self, name: str, jobs: Sequence[Candidate]) -> bool:
        return self.replica[name].budget.fits(len(jobs), sum(c.applicant.num_bytes for c in jobs))

    def end_s(self, name: str, jobs: Sequence[Candidate]) -> float:
        return sum(c.seconds_left for c in jobs) / self.replica[name].speed

    def overfull(self) -> Iterator[str]:
        for name, jobs in self.on.items():
            if jobs and not self.fits(name, jobs):
                held = sum(c.applicant.num_bytes for c in jobs)
                yield f"{name} holds {len(jobs)} jobs of {held:,} bytes; that is more than fits there."

    def misreported(self) -> Iterator[str]:
        """Moves and makespan that do not follow from the seats."""
        now = self.placement.replica_of
        moved = {Move(job, self.seated[job], now[job]) for job in now if self.seated.get(job, now[job]) != now[job]}
        for move in sorted(moved ^ set(self.placement.moves), key=lambda move: move.job):
            yield f"{move.job}: a move from {move.source} to {move.target} is not made, or not reported."
        last_s = max((self.end_s(name, jobs) for name, jobs in self.on.items()), default=0.0)
        if abs(last_s - self.placement.makespan_s) > ROUNDING * last_s:
            yield f"the makespan is {last_s:g} s; the placement has {self.placement.makespan_s:g} s."

    def held_back(self) -> Iterator[str]:
        """Jobs that wait although they fit beside those of their priority or a higher one."""
        admission = self.placement.admission
        for held in (*admission.preempt, *admission.wait, *admission.refuse):
            mine = self.job[held.job]
            for name, jobs in self.on.items():
                before = [c for c in jobs if c.applicant.priority >= mine.applicant.priority]
                if self.fits(name, [*before, mine]):
                    yield f"{held.job} does not train; it fits on {name} beside those of its priority."
                    break

    def idle(self, move_s: float) -> Iterator[str]:
        """Replicas without a job that a job of another would gain on."""
        for name in [name for name, jobs in self.on.items() if not jobs]:
            for source, jobs in self.on.items():
                gaining = [c.job for c in jobs if len(jobs) > 1 and self._gains(c, source, name, move_s)]
                if gaining:
                    yield f"{name} is idle while {source} has {len(jobs)} jobs; {gaining[0]} would gain there."
                    break

    def _gains(self, one: Candidate, source: str, target: str, move_s: float) -> bool:
        jobs = self.on[source]
        now_s = self.end_s(source, jobs)
        then_s = max(self.end_s(source, [c for c in jobs if c is not one]), self.end_s(target, [one]))
        cost_s = (
            move_s if self.seated.get(one.job) in (source, *[name for name in self.replica if name != target]) else 0
        )
        return self.fits(target, [one]) and now_s - then_s > cost_s + 1e-5 * now_s

    def useless(self) -> Iterator[str]:
        """Moves that do not make the last replica end sooner."""
        last_s = max(self.placement.makespan_s, self.least_s)
        for move in self.placement.moves:
            if move.source not in self.replica or len(self.on[move.target]) == 1:
                continue
            back = [*self.on[move.source], self.job[move.job]]
            if self.fits(move.source, back) and self.end_s(move.source, back) <= last_s * (1 + ROUNDING):
                yield f"{move.job} moves from {move.source} to {move.target} and nothing ends sooner for it."
