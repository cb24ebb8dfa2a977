"""The batch that a deployment is planned for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from weft.plan.bucket import Buckets, choose_buckets
from weft.plan.deploy.workload import DeployJob, draw_lengths
from weft.plan.dispatch.replica_time import FloatArray

SAMPLED_BATCHES = 100
"""Batches whose lengths are looked at, as LobRA does."""


def expected_batch(jobs: Sequence[DeployJob], seed: int = 0) -> Buckets:
    """A batch of all jobs with the lengths of a hundred, in the buckets that suit those best.

    The longest sample that may come is among them, so that every plan has a replica for it; and of a job that has one
    home its own longest, so that the home holds it.
    """
    drawn = draw_lengths(jobs, SAMPLED_BATCHES, seed)
    bounds = choose_buckets([*itertools.chain(*drawn), max(job.lengths.longest for job in jobs)]).bounds
    free = [place for place, job in enumerate(jobs) if job.is_free]
    at_home = [[place] for place, job in enumerate(jobs) if not job.is_free]
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
