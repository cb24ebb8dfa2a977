"""What a controller knows of a rank, and who is to train where by all that is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from weft.engine.events import MicrobatchDone
from weft.parallel.replicas.messages import RankReady
from weft.parallel.replicas.rank_link import RankHandle
from weft.plan.admit import Budget, Share
from weft.plan.place import Candidate, JobPlacement, Replica, place

if TYPE_CHECKING:
    from weft.engine.execute.protocol import ReplicaFacts
    from weft.parallel.replicas.known_job import JobRecord

FIRST_PACE = 10_000.0
"""Tokens a second that a replica is taken to train before any microbatch has told."""


@dataclass
class RankRecord:
    """A rank of a controller: its process, and what it has told."""

    process: RankHandle
    ready: RankReady | None = None
    """What it said once its replica was loaded; None while it starts."""
    permit: Path | None = None
    """It may write into the run directory as long as this file is there."""
    num_restarts: int = 0
    max_jobs: int | None = None
    """It had no room for more, whatever was predicted."""
    num_tokens: int = 0
    seconds: float = 0.0
    """Of its microbatches so far."""
    is_idle: bool = True
    is_ending: bool = False
    """Its controller has given it up."""
    failure: str | None = None
    """What it, or its controller, said about its end."""

    @property
    def index(self) -> int:
        """Its number."""
        return self.process.index

    @property
    def facts(self) -> ReplicaFacts:
        """Of its replica."""
        assert self.ready is not None, "it is still being loaded"
        return self.ready.facts

    def learn(self, event: MicrobatchDone) -> None:
        """Notes how fast it is."""
        self.num_tokens += event.tokens
        self.seconds += event.seconds

    def replica(self, speed: float) -> Replica:
        """What placement is told; one that is being loaded is expected, and takes no jobs yet."""
        if self.ready is None:
            return Replica(str(self.index), Budget(), is_draining=True)
        limits = [limit for limit in (self.ready.budget.max_jobs, self.max_jobs) if limit is not None]
        budget = replace(self.ready.budget, max_jobs=min(limits, default=None))
        return Replica(str(self.index), budget, speed)


def decide(jobs: Sequence[JobRecord], ranks: Sequence[RankRecord], weights: Mapping[str, float]) -> JobPlacement:
    """Who trains where from now on."""
    seconds, tokens = sum(rank.seconds for rank in ranks), sum(rank.num_tokens for rank in ranks)
    pace = tokens / seconds if seconds else FIRST_PACE
    candidates = [
        Candidate(job.applicant, job.tokens_left / pace, None if job.rank is None else str(job.rank))
        for job in jobs
        if job.wants_rank
    ]
    served: dict[str, int] = {}
    for job in jobs:
        served[job.spec.tenant] = served.get(job.spec.tenant, 0) + job.num_tokens
    shares = {tenant: Share(weights.get(tenant, 1.0), tokens) for tenant, tokens in served.items()}
    speeds = _speeds(ranks, pace)
    return place(candidates, [rank.replica(speed) for rank, speed in zip(ranks, speeds, strict=True)], shares)


def _speeds(ranks: Sequence[RankRecord], pace: float) -> list[float]:
    """How fast each rank is, on average 1: as predicted where replicas are unlike, measured where devices are."""
    ready = [rank.ready for rank in ranks if rank.ready is not None]
    if len({own.facts.layout for own in ready}) > 1:
        mean = sum(own.speed for own in ready) / len(ready)
        return [1.0 if rank.ready is None else rank.ready.speed / mean for rank in ranks]
    are_alike = len({str(own.facts.environment.get("device")) for own in ready}) == 1
    return [1.0 if are_alike or not rank.seconds else rank.num_tokens / rank.seconds / pace for rank in ranks]
