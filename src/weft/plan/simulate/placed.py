"""Runs jobs that are placed over replicas on their predicted seconds: what more replicas would add.

At the start and whenever a job ends, `plan.place` decides anew; in between, the jobs of a replica share its time in
equal parts. A job that moves needs `move_s` seconds of its new replica more. Nothing else takes time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from weft.errors import PlanError
from weft.plan.place import MOVE_S, Candidate, Replica, place

ROUNDING = 1e-9


@dataclass(frozen=True)
class PlacedRun:
    """When the jobs would end."""

    ends_s: Mapping[str, float]
    """Of every job, in the order in which they end."""
    num_moves: int

    @property
    def makespan_s(self) -> float:
        """When the last one ends."""
        return max(self.ends_s.values(), default=0.0)


def simulate_placed(
    candidates: Sequence[Candidate], replicas: Sequence[Replica], *, move_s: float = MOVE_S
) -> PlacedRun:
    """The predicted run of all jobs to their end; a PlanError if some never get a seat."""
    speed = {replica.name: replica.speed for replica in replicas}
    left = {c.job: c for c in candidates}
    ends_s: dict[str, float] = {}
    now_s, num_moves = 0.0, 0
    while left:
        placement = place(list(left.values()), replicas, move_s=move_s)
        if not placement.replica_of:
            raise PlanError(f"no replica can take what is left: {', '.join(sorted(left)[:4])}.", where="replicas")
        num_moves += len(placement.moves)
        moved = {move.job: move_s * speed[move.target] for move in placement.moves}
        left = {job: _seated(c, placement.replica_of.get(job), moved.get(job, 0.0)) for job, c in left.items()}
        num_on = Counter(placement.replica_of.values())
        rates = {job: speed[name] / num_on[name] for job, name in placement.replica_of.items()}
        step_s = min(left[job].seconds_left / rate for job, rate in rates.items())
        now_s += step_s
        for job, rate in rates.items():
            rest_s = left[job].seconds_left - step_s * rate
            if rest_s <= ROUNDING * now_s:
                ends_s[job] = now_s
                del left[job]
            else:
                left[job] = replace(left[job], seconds_left=rest_s)
    return PlacedRun(ends_s, num_moves)


def _seated(candidate: Candidate, name: str | None, extra_s: float) -> Candidate:
    return replace(candidate, replica=name, seconds_left=candidate.seconds_left + extra_s)
