"""The problem and the result of deployment planning."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from weft.errors import PlanError
from weft.plan.deploy.buckets import Buckets, FloatArray, ReplicaModel, bucket_sums, choose_buckets, fixed_buckets
from weft.plan.deploy.fleet import Dispatch, Fleet
from weft.plan.layout import Layout, ReplicaLayout
from weft.plan.level import PlannedReplicas

ONE_POOL = "gpus"


@dataclass(frozen=True)
class ReplicaKind:
    model: ReplicaModel
    pool: str = ONE_POOL

    @property
    def layout(self) -> ReplicaLayout:
        return self.model.layout

    @property
    def num_gpus(self) -> int:
        return self.model.layout.num_devices


@dataclass(frozen=True)
class DeployProblem:
    """Input of deployment planning: kinds of replicas, GPUs per pool, and the expected batch that replicas divide."""

    kinds: tuple[ReplicaKind, ...]
    pools: Mapping[str, int]
    buckets: Buckets
    """Expected batch, in whole samples."""

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
        return sum(self.pools.values())

    @property
    def gpus_S(self) -> FloatArray:
        return np.array([float(kind.num_gpus) for kind in self.kinds])

    def sample_s_SR(self, below_s: float = math.inf) -> FloatArray:
        """Seconds of a sample in full chunks by kind and bucket; infinite where it does not fit. With `below_s`,
        including its part of the time to fill pipelines in steps below that."""
        fleet = Fleet([kind.model for kind in self.kinds], self.buckets)
        seconds_SR: FloatArray = fleet.sample_s_KR * fleet.stretch_K(below_s)[:, None]
        return seconds_SR

    @property
    def alone_s_SR(self) -> FloatArray:
        """Seconds of a chunk with one sample by kind and bucket; infinite where it does not fit."""
        return np.stack([kind.model.costs(self.buckets).alone_s_R for kind in self.kinds])

    @property
    def job_s_SJ(self) -> FloatArray:
        """Seconds of each job with a home, alone on a replica of each kind; infinite where it does not fit."""
        if not self.buckets.at_home:
            return np.zeros((len(self.kinds), 0))
        return Fleet([kind.model for kind in self.kinds], self.buckets).job_s_KJ

    def models(self, counts: Sequence[int]) -> list[ReplicaModel]:
        return [kind.model for kind, count in zip(self.kinds, counts, strict=True) for _ in range(int(count))]


@dataclass(frozen=True)
class Deployment:
    problem: DeployProblem
    counts: tuple[int, ...]
    dispatch: Dispatch
    bound_s: float
    num_plans: float
    num_tried: int
    is_complete: bool = False
    """True if every plan was tried or cannot beat the best. The gap includes that of dispatch."""

    @property
    def step_s(self) -> float:
        return self.dispatch.step_s

    @property
    def gap(self) -> float:
        """Upper bound of the relative distance from the best plan."""
        return max(0.0, self.step_s / self.bound_s - 1.0)

    @property
    def replicas(self) -> tuple[ReplicaKind, ...]:
        kinds = zip(self.problem.kinds, self.counts, strict=True)
        return tuple(kind for kind, count in kinds for _ in range(count))

    @property
    def models(self) -> list[ReplicaModel]:
        return self.problem.models(self.counts)

    @property
    def homes(self) -> tuple[int, ...]:
        """The home replica, by index, of each job that has one, in every step."""
        return Fleet(self.models, self.problem.buckets).homes

    def planned_replicas(self, jobs: Iterable[str]) -> PlannedReplicas:
        """The replicas in the form that a run takes; `jobs`: names of the jobs with a home."""
        return Fleet(self.models, self.problem.buckets).planned(jobs)

    @property
    def layout(self) -> Layout:
        return Layout(tuple(kind.layout for kind in self.replicas))

    @property
    def gpus_used(self) -> int:
        return sum(kind.num_gpus for kind in self.replicas)

    @property
    def gpu_seconds(self) -> float:
        return self.problem.num_gpus * self.step_s

    def __str__(self) -> str:
        many = len(self.problem.pools) > 1
        return ", ".join(
            f"{kind.layout}×{count}" + (f" on {kind.pool}" if many else "")
            for kind, count in zip(self.problem.kinds, self.counts, strict=True)
            if count
        )


SHORTEST = 16


@dataclass(frozen=True)
class LengthSpread:
    mean: float
    skewness: float
    longest: int

    def __post_init__(self) -> None:
        if not (SHORTEST <= self.mean <= self.longest and self.skewness > 0):
            raise PlanError(
                f"the mean length is {self.mean:g}, the longest {self.longest:,} and the skewness {self.skewness:g}; "
                f"the mean must be from {SHORTEST} to the longest, the skewness above 0."
            )

    def draw(self, count: int, rng: np.random.Generator) -> list[int]:
        spread = np.sqrt(np.log(_growth(self.skewness)))
        drawn = rng.lognormal(np.log(self.mean) - spread**2 / 2, spread, count)
        found: list[int] = np.clip(np.rint(drawn), SHORTEST, self.longest).astype(int).tolist()
        return found


@dataclass(frozen=True)
class KnownLengths:
    lengths: tuple[int, ...]

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def draw(self, count: int, rng: np.random.Generator) -> list[int]:
        found: list[int] = rng.choice(self.lengths, count).tolist()
        return found


@dataclass(frozen=True)
class DeployJob:
    name: str
    batch_size: int
    lengths: LengthSpread | KnownLengths
    is_any_order: bool = True
    """True if its sums do not depend on the order, so that replicas may share its samples; else it has one home."""


def batch_samples(batch_size: int, num_groups: int, num_samples: int) -> int:
    """Samples of a global batch of so many rows, of which there are `num_groups` with `num_samples` samples in all."""
    return max(1, round(min(batch_size, num_groups) * num_samples / num_groups))


def draw_lengths(jobs: Sequence[DeployJob], num_batches: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [job.lengths.draw(job.batch_size * num_batches, rng) for job in jobs]


def draw_batches(jobs: Sequence[DeployJob], num_batches: int, seed: int = 0) -> list[list[int]]:
    """Fused global batches, one of every job in each: lengths of their samples, job after job."""
    drawn = draw_lengths(jobs, num_batches, seed)
    sizes = [job.batch_size for job in jobs]
    return [
        [length for own, size in zip(drawn, sizes, strict=True) for length in own[batch * size : (batch + 1) * size]]
        for batch in range(num_batches)
    ]


def in_buckets(jobs: Sequence[DeployJob], lengths: Sequence[int], bounds: Sequence[int] | None = None) -> Buckets:
    """A drawn batch in these buckets, or in ones chosen for it; samples of a job that has one home stay together."""
    found = choose_buckets(lengths) if bounds is None else fixed_buckets(lengths, bounds)
    ends = list(itertools.accumulate(job.batch_size for job in jobs))
    own = zip(jobs, ends, strict=True)
    return found.with_homes(lengths[end - job.batch_size : end] for job, end in own if not job.is_any_order)


def _growth(skewness: float) -> float:
    """exp(σ²) of the log-normal distribution with this skewness: the root w > 1 of (w + 2)²·(w − 1) = skewness²."""
    roots = np.roots([1.0, 3.0, 0.0, -4.0 - skewness**2])
    real = roots[np.abs(roots.imag) < 1e-6].real
    return float(real[real > 1.0][0])


SAMPLED_BATCHES = 100
"""Batches whose lengths are drawn, as in LobRA."""


def expected_batch(jobs: Sequence[DeployJob], seed: int = 0) -> Buckets:
    """A batch of all jobs with the lengths of a hundred, in the buckets that suit those best. The longest possible
    sample is included, so that every plan has a replica for it; and of a job with a home its own longest, so that the
    home holds it."""
    drawn = draw_lengths(jobs, SAMPLED_BATCHES, seed)
    bounds = choose_buckets([*itertools.chain(*drawn), max(job.lengths.longest for job in jobs)]).bounds
    free = [index for index, job in enumerate(jobs) if job.is_any_order]
    at_home = [[index] for index, job in enumerate(jobs) if not job.is_any_order]
    sums_3R, homes = np.zeros((3, len(bounds))), []
    for together in [free, *at_home] if free else at_home:
        longest = max(jobs[index].lengths.longest for index in together)
        known_3R = bucket_sums([*itertools.chain(*(drawn[index] for index in together)), longest], bounds)
        size = sum(jobs[index].batch_size for index in together)
        counts_R = _rounded_up(known_3R[0], size) if together is free else _whole(known_3R[0], size)
        sums_3R += known_3R * counts_R / np.maximum(known_3R[0], 1.0)
        homes += [] if together is free else [counts_R]
    used = np.flatnonzero(sums_3R[0])
    counts, tokens, pairs = (tuple(float(x) for x in own[used]) for own in sums_3R)
    kept = tuple(tuple(int(count) for count in own[used]) for own in homes)
    return Buckets(tuple(bounds[index] for index in used), counts, tokens, pairs, kept)


def _rounded_up(counts_R: FloatArray, size: int) -> FloatArray:
    """The shares of `size` samples, rounded up so that no bucket is empty: a large batch has a few samples more."""
    found: FloatArray = np.ceil(counts_R * size / counts_R.sum() - 1e-9)
    return found


def _whole(counts_R: FloatArray, size: int) -> FloatArray:
    """The shares of exactly `size` samples, the largest fractions rounded up; the longest is always included."""
    wanted_R = counts_R * size / counts_R.sum()
    found: FloatArray = np.floor(wanted_R + 1e-9)
    rest = size - int(found.sum())
    found[np.argsort(found - wanted_R, kind="stable")[:rest]] += 1
    last = int(np.flatnonzero(counts_R)[-1])
    if not found[last]:
        found[[int(np.argmax(found)), last]] += (-1, 1)
    return found
