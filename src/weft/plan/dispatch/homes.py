"""On which replica each job is at home whose samples may not be shared out, so that the slowest ends soonest.

Jobs that take longest go first, each to where it ends soonest among the replicas that hold it. Where samples of other
jobs are shared out around them, jobs leave the slowest replica, or are exchanged for others, as long as that helps.
O(jobs² · replicas) for a change; deterministic, ties to the first. `plan/spread/homes.py` decides where jobs of a run
are, by their tokens; here a plan is priced that does not run yet. Tests compare with every choice of homes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.plan.dispatch.fleet import Fleet
from weft.plan.dispatch.replica_time import IntArray


@dataclass
class Homes:
    """Where each job of a fleet is, which may change."""

    fleet: Fleet
    of_J: IntArray

    @classmethod
    def choose(cls, fleet: Fleet) -> Homes:
        """Homes where nothing else runs."""
        found = cls(fleet, np.zeros(len(fleet.home_JR), dtype=np.int64))
        if len(found.of_J):
            counts_KR = np.zeros(fleet.size_KR.shape, dtype=np.int64)
            for job in np.argsort(-fleet.job_s_KJ.min(axis=0), kind="stable"):
                found.of_J[job] = np.argmin(fleet.seconds_with_job(counts_KR, fleet.home_JR[job]))
                counts_KR[found.of_J[job]] += fleet.home_JR[job]
            while found.change(counts_KR):
                pass
        return found

    @property
    def counts_KR(self) -> IntArray:
        """Samples at home, by replica and bucket."""
        counts_KR = np.zeros(self.fleet.size_KR.shape, dtype=np.int64)
        np.add.at(counts_KR, self.of_J, self.fleet.home_JR)
        return counts_KR

    def change(self, counts_KR: IntArray) -> bool:
        """A job leaves the slowest replica, or is exchanged for another, in place, if both then end sooner."""
        if not len(self.of_J):
            return False
        fleet, seconds_K = self.fleet, self.fleet.seconds(counts_KR)
        slowest = int(np.argmax(seconds_K))
        best = (float(seconds_K[slowest]) * (1 - 1e-9), -1, -1, -1)
        for job in np.flatnonzero(self.of_J == slowest).tolist():
            given_R = fleet.home_JR[job]
            left_R = counts_KR[slowest] - given_R
            alone_s = float(_one(fleet, slowest, left_R))
            for taker, taken_s in enumerate(fleet.seconds_with_job(counts_KR, given_R)):
                if taker != slowest:
                    best = min(best, (max(alone_s, float(taken_s)), job, taker, -1))
            for other in np.flatnonzero(self.of_J != slowest).tolist():
                taker, got_R = int(self.of_J[other]), fleet.home_JR[other]
                ends = (_one(fleet, slowest, left_R + got_R), _one(fleet, taker, counts_KR[taker] - got_R + given_R))
                best = min(best, (max(ends), job, taker, other))
        _, job, taker, other = best
        if job < 0:
            return False
        moved_R = fleet.home_JR[job] - (fleet.home_JR[other] if other >= 0 else 0)
        counts_KR[slowest] -= moved_R
        counts_KR[taker] += moved_R
        self.of_J[job] = taker
        if other >= 0:
            self.of_J[other] = slowest
        return True


def _one(fleet: Fleet, replica: int, counts_R: IntArray) -> float:
    """Seconds of one replica; infinite if it cannot hold what it has."""
    if not (fleet.holds_KR[replica] | (counts_R == 0)).all():
        return float("inf")
    return float(fleet.seconds(np.broadcast_to(counts_R, fleet.size_KR.shape))[replica])
