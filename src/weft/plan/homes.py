"""On which replica each job is at home whose samples may not be shared out: the one rule, of plans and of runs.

Problem: min max_k Σ seconds of a global batch of the jobs at home on k, each on a replica that holds its samples; every
move costs a job's state its way. A step of every job counts and not what is left of it: replicas run as many global
batches of each job before they wait for each other. Method: jobs that have no home yet go, the longest first, where
they end soonest. Then a job leaves the replica that ends last, or is exchanged for another, as long as both replicas
end sooner; clearly sooner, where that moves a job that had a home. O(jobs · (jobs + replicas)) for a change;
deterministic, ties to the first job and replica. Tests compare with every choice of homes.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

LEAST_GAIN = 0.1
"""Share of its time by which the slowest replica must end sooner for a job to be moved that has a home."""
ROUNDING = 1e-9


@dataclass(frozen=True)
class PlannedReplicas:
    """What a plan says of its replicas, for the run that executes it."""

    holds: tuple[int, ...]
    """Tokens of the longest chunk, and so of the longest sample, of each."""
    home_s: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Seconds of a global batch of each job that has one home, by replica; infinite where that cannot hold it."""

    @property
    def homes(self) -> dict[str, int]:
        """Where the jobs are."""
        return choose_homes(self.home_s)


def choose_homes(seconds: Mapping[str, Sequence[float]], before: Mapping[str, int] | None = None) -> dict[str, int]:
    """The replica of each job, given the seconds of its global batch on each of them and where jobs are already.

    Infinite seconds: it cannot be there. Each can be somewhere.
    """
    stays = before or {}
    homes = {job: stays[job] for job in seconds if job in stays}
    ends = _ends(seconds, homes)
    for job in sorted((job for job in seconds if job not in stays), key=lambda job: -min(seconds[job])):
        after = [end + own for end, own in zip(ends, seconds[job], strict=True)]
        homes[job] = after.index(min(after))
        ends[homes[job]] = after[homes[job]]
    while (change := _best_change(seconds, homes, ends, stays)) is not None:
        homes |= change
        ends = _ends(seconds, homes)
    return homes


def _ends(seconds: Mapping[str, Sequence[float]], homes: Mapping[str, int]) -> list[float]:
    """When each replica has done a global batch of its jobs."""
    ends = [0.0] * len(next(iter(seconds.values()), ()))
    for job, home in homes.items():
        ends[home] += seconds[job][home]
    return ends


def _best_change(
    seconds: Mapping[str, Sequence[float]], homes: Mapping[str, int], ends: Sequence[float], stays: Mapping[str, int]
) -> dict[str, int] | None:
    """Who leaves the replica that ends last, and who comes for it; None if that helps nobody enough."""
    if not homes:
        return None
    slowest = max(range(len(ends)), key=lambda k: (ends[k], -k))
    best, found = ends[slowest], None
    there = [job for job in seconds if homes[job] == slowest]
    left = {job: sum(seconds[other][slowest] for other in there if other != job) for job in there}
    for job, (taker, end) in itertools.product(there, enumerate(ends)):
        after = max(left[job], end + seconds[job][taker])
        if taker != slowest and after < min(best, ends[slowest] * _least([job], stays)):
            best, found = after, {job: taker}
    for job, other in itertools.product(there, seconds):
        taker = homes[other]
        after = max(left[job] + seconds[other][slowest], ends[taker] - seconds[other][taker] + seconds[job][taker])
        if taker != slowest and after < min(best, ends[slowest] * _least([job, other], stays)):
            best, found = after, {job: taker, other: slowest}
    return found


def _least(jobs: Iterable[str], stays: Container[str]) -> float:
    """What part of the slowest replica's time must be left for these jobs to be moved."""
    return 1.0 - (LEAST_GAIN if any(job in stays for job in jobs) else ROUNDING)
