"""On which replica each job is at home that is not spread over all of them.

Problem: min max_k Σ load / speed_k over the jobs at home on k; every move costs the job's state its way. Method: one
job at a time leaves the replica that would end last for the one on which it ends soonest, as long as both then end
clearly sooner. O(jobs · replicas) for a move; deterministic, ties by name and place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

LEAST_GAIN = 0.1
"""Share of its time by which the slowest replica must end sooner for a job to be moved."""


def choose_homes(loads: Mapping[str, float], speeds: Sequence[float], before: Mapping[str, int]) -> dict[str, int]:
    """The replica of each job, given its tokens left, what each replica does in a second, and where jobs are."""
    homes = {job: before.get(job, 0) for job in sorted(loads)}
    seconds = [sum(loads[job] for job, home in homes.items() if home == k) / speed for k, speed in enumerate(speeds)]
    while True:
        slowest = max(range(len(speeds)), key=lambda k: (seconds[k], -k))
        best: tuple[float, str, int] | None = None
        for job, home in homes.items():
            for target in range(len(speeds)) if home == slowest else ():
                left = seconds[slowest] - loads[job] / speeds[slowest]
                end = max(left, seconds[target] + loads[job] / speeds[target])
                if target != slowest and end < seconds[slowest] * (1 - LEAST_GAIN):
                    best = min(best or (end, job, target), (end, job, target))
        if best is None:
            return homes
        _, job, target = best
        seconds[slowest] -= loads[job] / speeds[slowest]
        seconds[target] += loads[job] / speeds[target]
        homes[job] = target
