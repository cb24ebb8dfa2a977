"""What a cluster is to train: jobs with their batch sizes and the lengths of their samples.

Lengths are those of real data, or drawn from a log-normal distribution with a given mean and skewness, cut off at the
longest: few published data sets come with more than that.

The batch that a deployment is planned for.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.errors import PlanError
from weft.plan.bucket import Buckets, choose_buckets, fixed_buckets
from weft.plan.dispatch.replica_time import FloatArray

SHORTEST = 16


@dataclass(frozen=True)
class LengthSpread:
    """Lengths known only by their distribution."""

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
        """So many lengths."""
        spread = np.sqrt(np.log(_growth(self.skewness)))
        drawn = rng.lognormal(np.log(self.mean) - spread**2 / 2, spread, count)
        found: list[int] = np.clip(np.rint(drawn), SHORTEST, self.longest).astype(int).tolist()
        return found


@dataclass(frozen=True)
class KnownLengths:
    """Lengths of real samples, of which some are drawn."""

    lengths: tuple[int, ...]

    @property
    def longest(self) -> int:
        """Tokens of the longest."""
        return max(self.lengths)

    def draw(self, count: int, rng: np.random.Generator) -> list[int]:
        """So many of them, any of them more than once."""
        found: list[int] = rng.choice(self.lengths, count).tolist()
        return found


@dataclass(frozen=True)
class DeployJob:
    """A job as far as a deployment is concerned."""

    name: str
    batch_size: int
    """Samples of its global batch."""
    lengths: LengthSpread | KnownLengths
    is_any_order: bool = True
    """Its sums do not depend on any order, so that replicas may share its samples; else it has one home."""


def batch_samples(batch_size: int, num_groups: int, num_samples: int) -> int:
    """Samples of a global batch of so many rows, of which there are `num_groups` with several samples each."""
    return max(1, round(min(batch_size, num_groups) * num_samples / num_groups))


def draw_lengths(jobs: Sequence[DeployJob], num_batches: int, seed: int = 0) -> list[list[int]]:
    """Lengths of so many global batches of each job."""
    rng = np.random.default_rng(seed)
    return [job.lengths.draw(job.batch_size * num_batches, rng) for job in jobs]


def draw_batches(jobs: Sequence[DeployJob], num_batches: int, seed: int = 0) -> list[list[int]]:
    """Fused global batches, one of every job in each: the lengths of their samples, job after job."""
    drawn = draw_lengths(jobs, num_batches, seed)
    sizes = [job.batch_size for job in jobs]
    return [
        [length for own, size in zip(drawn, sizes, strict=True) for length in own[batch * size : (batch + 1) * size]]
        for batch in range(num_batches)
    ]


def in_buckets(jobs: Sequence[DeployJob], lengths: Sequence[int], bounds: Sequence[int] | None = None) -> Buckets:
    """A drawn batch in buckets, of these bounds or chosen for it; samples of a job that has one home stay together."""
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
"""Batches whose lengths are looked at, as LobRA does."""


def expected_batch(jobs: Sequence[DeployJob], seed: int = 0) -> Buckets:
    """A batch of all jobs with the lengths of a hundred, in the buckets that suit those best.

    The longest sample that may come is among them, so that every plan has a replica for it; and of a job that has one
    home its own longest, so that the home holds it.
    """
    drawn = draw_lengths(jobs, SAMPLED_BATCHES, seed)
    bounds = choose_buckets([*itertools.chain(*drawn), max(job.lengths.longest for job in jobs)]).bounds
    free = [place for place, job in enumerate(jobs) if job.is_any_order]
    at_home = [[place] for place, job in enumerate(jobs) if not job.is_any_order]
    sums_3R, homes = np.zeros((3, len(bounds))), []
    for together in [free, *at_home] if free else at_home:
        longest = max(jobs[place].lengths.longest for place in together)
        known_3R = _sums([*itertools.chain(*(drawn[place] for place in together)), longest], bounds)
        size = sum(jobs[place].batch_size for place in together)
        counts_R = _rounded_up(known_3R[0], size) if together is free else _whole(known_3R[0], size)
        sums_3R += known_3R * counts_R / np.maximum(known_3R[0], 1.0)
        homes += [] if together is free else [counts_R]
    used = np.flatnonzero(sums_3R[0])
    counts, tokens, pairs = (tuple(float(x) for x in own[used]) for own in sums_3R)
    kept = tuple(tuple(int(count) for count in own[used]) for own in homes)
    return Buckets(tuple(bounds[place] for place in used), counts, tokens, pairs, kept)


def _sums(lengths: Sequence[int], bounds: Sequence[int]) -> FloatArray:
    """Samples, tokens and squares of lengths, by bucket."""
    known = np.asarray(lengths, dtype=np.float64)
    place = np.searchsorted(bounds, known)
    return np.stack([np.bincount(place, weights, len(bounds)) for weights in (None, known, known * known)])


def _rounded_up(counts_R: FloatArray, size: int) -> FloatArray:
    """The parts of so many samples, so that no bucket is forgotten: a large batch has a few samples more."""
    found: FloatArray = np.ceil(counts_R * size / counts_R.sum() - 1e-9)
    return found


def _whole(counts_R: FloatArray, size: int) -> FloatArray:
    """The parts of just so many samples, the largest rests rounded up; the longest is always among them."""
    wanted_R = counts_R * size / counts_R.sum()
    found: FloatArray = np.floor(wanted_R + 1e-9)
    rest = size - int(found.sum())
    found[np.argsort(found - wanted_R, kind="stable")[:rest]] += 1
    last = int(np.flatnonzero(counts_R)[-1])
    if not found[last]:
        found[[int(np.argmax(found)), last]] += (-1, 1)
    return found
