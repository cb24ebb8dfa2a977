"""Decides who trains now: preemptive priorities, fair share between tenants, first come first served, as many as fit.

Problem: given the jobs that train and those that wait, choose the set R that trains next, the first in the order

    priority, highest first;  then the tenant with least service per weight;  then arrival

such that   (fixed + Σ bytes of R) · (1 + margin) ≤ total   and   |R| ≤ max_jobs.

Method: one walk in that order, taking every job that still fits: O(n log n + n · tenants). A tenant's service is what
it has received, in whole quanta, plus one quantum for each of its jobs already taken. So tenants take seats in turn,
and one that is ahead loses them one by one as its lead grows, not all at once.

Bounds that the tests prove:
- R is within the budget.
- A job waits only if it does not fit beside the running jobs of its own priority or a higher one. What is left over
  goes to later jobs as a loan: earlier ones get it back at the next decision.
- Among equals of one tenant the first to arrive trains first; a decision without a change changes nothing.
- No starvation: the first in the order always fits alone (else it is refused, with the arithmetic), jobs end, and
  tenants that train get ahead of those that wait. Endless work of a higher priority does keep lower ones waiting.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from weft.errors import PlanError, size
from weft.job_state import Reason, ReasonCode

QUANTUM_TOKENS = 1_000_000
"""Step in which service is compared: about a minute of an 8B backbone on one GPU. Exchanging an adapter takes under a
tenth of a second, so fairness costs less than 0.1 %."""


EVALUATED_PER_TRAINED = 3
"""Evaluated tokens that count as one trained token in a tenant's share: they have no backward pass."""
MARGIN = 0.05
"""Share of a GPU's memory kept free: allocators round up, and microbatches differ."""


@dataclass(frozen=True, slots=True)
class Applicant:
    job: str
    arrival: int
    num_bytes: int = 0
    """Bytes that the job adds while it trains."""
    priority: int = 0
    tenant: str = "default"


@dataclass(frozen=True, slots=True)
class Share:
    weight: float = 1.0
    served_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Budget:
    total_bytes: int | None = None
    fixed_bytes: int = 0
    """Bytes of the backbone and of a microbatch's activations."""
    margin: float = 0.0
    """Largest relative error of the predictions: 0.1 keeps a tenth in reserve."""
    proven_bytes: int = 0
    """Largest number of bytes that jobs have held together without running out; overrules the estimate."""
    max_jobs: int | None = None
    """Largest number of jobs at a time; None: unlimited."""

    def __post_init__(self) -> None:
        if self.margin < 0:
            raise PlanError(f"is {self.margin:g}; it must be at least 0.", where="margin")
        if self.max_jobs is not None and self.max_jobs < 1:
            raise PlanError(f"is {self.max_jobs}; it must be at least 1.", where="max_jobs")

    @property
    def usable_bytes(self) -> int | None:
        if self.total_bytes is None:
            return None
        return max(int(self.total_bytes / (1 + self.margin)) - self.fixed_bytes, self.proven_bytes, 0)

    def fits(self, num_jobs: int, num_bytes: int) -> bool:
        usable = self.usable_bytes
        return (self.max_jobs is None or num_jobs <= self.max_jobs) and (usable is None or num_bytes <= usable)

    def num_alike(self, num_bytes: int) -> int | None:
        """Number of jobs of this size that fit together; None: any."""
        usable = self.usable_bytes
        by_memory = () if usable is None else (usable // max(num_bytes, 1),)
        return min((*by_memory, *(() if self.max_jobs is None else (self.max_jobs,))), default=None)

    def why_never(self, num_bytes: int) -> Reason | None:
        """Sentence with the arithmetic if a job does not fit even alone; None if it does."""
        usable = self.usable_bytes
        if usable is None or num_bytes <= usable:
            return None
        assert self.total_bytes is not None
        return Reason(
            ReasonCode.DOES_NOT_FIT,
            f"can never fit: it needs {size(num_bytes)}, and of {size(self.total_bytes)} only {size(usable)} are for "
            f"jobs ({size(self.fixed_bytes)} go to the backbone and its microbatches, {self.margin:.0%} is kept as a "
            "margin).",
        )


@dataclass(frozen=True, slots=True)
class HeldJob:
    job: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class Admission:
    """The changes at a step boundary; jobs in the order of the walk."""

    start: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    preempt: tuple[HeldJob, ...] = ()
    wait: tuple[HeldJob, ...] = ()
    refuse: tuple[HeldJob, ...] = ()
    """Jobs that can never fit; running jobs are never among them."""


class Room(Protocol):
    """The capacity that jobs are admitted to, one after another: one device, or several together."""

    order: list[Applicant]

    def why_never(self, num_bytes: int) -> Reason | None:
        """Sentence with the arithmetic if a job of this size does not fit even alone; None if it does."""

    def take(self, applicant: Applicant) -> Reason | None:
        """Admits a job, or returns the reason why there is no room."""


@dataclass
class DeviceRoom:
    budget: Budget
    order: list[Applicant] = field(default_factory=list)
    num_bytes: int = 0

    def why_never(self, num_bytes: int) -> Reason | None:
        return self.budget.why_never(num_bytes)

    def take(self, applicant: Applicant) -> Reason | None:
        num_bytes = self.num_bytes + applicant.num_bytes
        if self.budget.fits(len(self.order) + 1, num_bytes):
            self.order.append(applicant)
            self.num_bytes = num_bytes
            return None
        limit, usable = self.budget.max_jobs, self.budget.usable_bytes
        if limit is not None and len(self.order) >= limit:
            train = "job trains" if limit == 1 else "jobs train"
            return Reason(ReasonCode.NO_SEAT, f"waits for a seat: {limit} {train}, max_jobs allows no more")
        assert usable is not None
        held = f"{size(self.num_bytes)} of {size(usable)}"
        text = f"waits for memory: it needs {size(applicant.num_bytes)}, jobs before it hold {held}"
        return Reason(ReasonCode.NO_MEMORY_NOW, text)


def admit(
    waiting: Sequence[Applicant],
    running: Sequence[Applicant],
    budget: Budget,
    shares: Mapping[str, Share] | None = None,
) -> Admission:
    """Decides which jobs train from this step boundary on; a tenant without a share has weight 1 and no service."""
    return admit_to(DeviceRoom(budget), waiting, running, shares)


def admit_to(
    room: Room,
    waiting: Sequence[Applicant],
    running: Sequence[Applicant],
    shares: Mapping[str, Share] | None = None,
) -> Admission:
    """`admit` for any room, which is empty before and holds the running jobs afterwards."""
    _check(waiting, running, shares or {})
    reasons = [(a, room.why_never(a.num_bytes)) for a in sorted(waiting, key=_rank)]
    refuse = [HeldJob(a.job, reason) for a, reason in reasons if reason is not None]
    refused = {held.job for held in refuse}
    were_running = {a.job for a in running}
    preempt: list[HeldJob] = []
    wait: list[HeldJob] = []
    candidates = sorted((a for a in (*waiting, *running) if a.job not in refused), key=_rank)
    for _, equals in itertools.groupby(candidates, key=lambda a: a.priority):
        for applicant, reason in _serve(list(equals), room, shares or {}):
            if applicant.job in were_running:
                newcomers = ", ".join(a.job for a in room.order if a.job not in were_running)
                if newcomers:
                    reason = Reason(ReasonCode.GAVE_WAY, f"gives way to {newcomers}")
                preempt.append(HeldJob(applicant.job, reason))
            else:
                wait.append(HeldJob(applicant.job, reason))
    start = tuple(a.job for a in room.order if a.job not in were_running)
    keep = tuple(a.job for a in room.order if a.job in were_running)
    return Admission(start, keep, tuple(preempt), tuple(wait), tuple(refuse))


def _serve(equals: Sequence[Applicant], room: Room, shares: Mapping[str, Share]) -> list[tuple[Applicant, Reason]]:
    """Admits jobs of one priority, tenants in turn; returns those without room, with the reason."""
    lines: dict[str, list[Applicant]] = {}
    for applicant in reversed(equals):
        lines.setdefault(applicant.tenant, []).append(applicant)
    counts = {tenant: sum(a.tenant == tenant for a in room.order) for tenant in lines}

    def turn(tenant: str) -> tuple[float, int, str]:
        share = shares.get(tenant, Share())
        service = (share.served_tokens // QUANTUM_TOKENS + counts[tenant]) / share.weight
        return (service, lines[tenant][-1].arrival, lines[tenant][-1].job)

    left: list[tuple[Applicant, Reason]] = []
    while lines:
        tenant = min(lines, key=turn)
        applicant = lines[tenant].pop()
        if not lines[tenant]:
            del lines[tenant]
        reason = room.take(applicant)
        if reason is None:
            counts[tenant] += 1
        else:
            left.append((applicant, reason))
    return left


def _rank(applicant: Applicant) -> tuple[int, int, str]:
    return (-applicant.priority, applicant.arrival, applicant.job)


def _check(waiting: Sequence[Applicant], running: Sequence[Applicant], shares: Mapping[str, Share]) -> None:
    seen: set[str] = set()
    for applicant in (*waiting, *running):
        if applicant.job in seen:
            raise PlanError("is given twice; every job once waits or trains.", where=applicant.job)
        if applicant.num_bytes < 0:
            raise PlanError(f"needs {applicant.num_bytes} bytes; that must be at least 0.", where=applicant.job)
        seen.add(applicant.job)
    for tenant, share in shares.items():
        if not share.weight > 0:
            raise PlanError(f"has the weight {share.weight:g}; it must be above 0.", where=tenant)
