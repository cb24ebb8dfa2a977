"""What a deployment is planned from, and what comes of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from weft.errors import PlanError
from weft.plan.bucket import Buckets
from weft.plan.dispatch import Dispatch, Fleet, ReplicaModel
from weft.plan.dispatch.replica_time import FloatArray
from weft.plan.homes import PlannedReplicas
from weft.plan.layout import Layout, ReplicaLayout

ONE_POOL = "gpus"
"""The pool of a cluster of alike GPUs."""


@dataclass(frozen=True)
class ReplicaKind:
    """Replicas of one layout on the GPUs of one pool."""

    model: ReplicaModel
    pool: str = ONE_POOL

    @property
    def layout(self) -> ReplicaLayout:
        """How each is spread over GPUs."""
        return self.model.layout

    @property
    def num_gpus(self) -> int:
        """GPUs of each."""
        return self.model.layout.num_devices


@dataclass(frozen=True)
class DeployProblem:
    """Kinds of replicas, GPUs to put them on, and the batch they are to share."""

    kinds: tuple[ReplicaKind, ...]
    pools: Mapping[str, int]
    """GPUs by pool."""
    buckets: Buckets
    """An expected batch, in whole samples."""

    def __post_init__(self) -> None:
        if not self.kinds:
            raise PlanError("there is no layout to choose from; give at least one.", where="deploy")
        for pool, count in self.pools.items():
            if count < 1:
                raise PlanError(f"has {count} GPUs; at least 1.", where=pool)
        fitting = [kind for kind in self.kinds if kind.num_gpus <= self.pools.get(kind.pool, 0)]
        longest = max((kind.model.most_tokens for kind in fitting), default=0)
        if self.buckets.bounds[-1] > longest:
            gpus = ", ".join(f"{count} of {pool}" for pool, count in self.pools.items())
            raise PlanError(
                f"samples are padded to up to {self.buckets.bounds[-1]:,} tokens; the largest replica on these GPUs "
                f"({gpus}) holds {longest:,}.",
                where="deploy",
            )

    @property
    def num_gpus(self) -> int:
        """GPUs of all pools."""
        return sum(self.pools.values())

    @property
    def gpus_S(self) -> FloatArray:
        """GPUs of a replica of each kind."""
        return np.array([float(kind.num_gpus) for kind in self.kinds])

    def sample_s_SR(self, below_s: float = math.inf) -> FloatArray:
        """Seconds of a sample in full chunks by kind and bucket; infinite where it does not fit.

        Where only steps below `below_s` matter, with its part of the time that pipelines take to fill.
        """
        fleet = Fleet.of([kind.model for kind in self.kinds], self.buckets)
        seconds_SR: FloatArray = fleet.sample_s_KR * fleet.stretch_K(below_s)[:, None]
        return seconds_SR

    @property
    def alone_s_SR(self) -> FloatArray:
        """Seconds of a chunk with one sample, likewise."""
        return np.stack([kind.model.costs(self.buckets).alone_s_R for kind in self.kinds])

    @property
    def job_s_SJ(self) -> FloatArray:
        """Seconds of each job that has one home, alone on a replica of each kind; infinite where it does not fit."""
        if not self.buckets.at_home:
            return np.zeros((len(self.kinds), 0))
        return Fleet.of([kind.model for kind in self.kinds], self.buckets).job_s_KJ

    def models(self, counts: Sequence[int]) -> list[ReplicaModel]:
        """The replicas of a plan, kind after kind."""
        return [kind.model for kind, count in zip(self.kinds, counts, strict=True) for _ in range(int(count))]


@dataclass(frozen=True)
class Deployment:
    """Which replicas a cluster gets."""

    problem: DeployProblem
    counts: tuple[int, ...]
    """Replicas of each kind."""
    dispatch: Dispatch
    """How they would share the expected batch."""
    bound_s: float
    """No plan from these kinds, however its batch is shared out, has a step below it."""
    num_plans: float
    """Plans that there are."""
    num_tried: int
    """Plans whose dispatch was found."""
    is_complete: bool = False
    """Every plan was tried, or cannot be better than the best. What dispatch finds need not be the best there is, which
    the gap counts."""

    @property
    def step_s(self) -> float:
        """Predicted for the expected batch."""
        return self.dispatch.step_s

    @property
    def gap(self) -> float:
        """At most so much longer than the best plan, as a share of it."""
        return max(0.0, self.step_s / self.bound_s - 1.0)

    @property
    def replicas(self) -> tuple[ReplicaKind, ...]:
        """Every replica, in the order of the dispatch."""
        kinds = zip(self.problem.kinds, self.counts, strict=True)
        return tuple(kind for kind, count in kinds for _ in range(count))

    @property
    def models(self) -> list[ReplicaModel]:
        """What dispatch asks each replica for, in the same order."""
        return self.problem.models(self.counts)

    @property
    def homes(self) -> tuple[int, ...]:
        """The replica of each job that has one, by its place, in every step."""
        return Fleet.of(self.models, self.problem.buckets).homes

    def planned_replicas(self, jobs: Iterable[str]) -> PlannedReplicas:
        """What a run that executes the plan has to know of it; `jobs`: the names of those that have one home."""
        return Fleet.of(self.models, self.problem.buckets).planned(jobs)

    @property
    def layout(self) -> Layout:
        """That of a run on these replicas."""
        return Layout(tuple(kind.layout for kind in self.replicas))

    @property
    def gpus_used(self) -> int:
        """GPUs that have a replica."""
        return sum(kind.num_gpus for kind in self.replicas)

    @property
    def gpu_seconds(self) -> float:
        """Of one step: idle GPUs count, because nobody else can have them."""
        return self.problem.num_gpus * self.step_s

    def __str__(self) -> str:
        many = len(self.problem.pools) > 1
        return ", ".join(
            f"{kind.layout}×{count}" + (f" on {kind.pool}" if many else "")
            for kind, count in zip(self.problem.kinds, self.counts, strict=True)
            if count
        )
