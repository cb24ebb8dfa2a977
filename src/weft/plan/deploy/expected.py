"""The batch that a deployment is planned for."""

from __future__ import annotations

from collections.abc import Sequence

from weft.plan.bucket import Buckets, choose_buckets
from weft.plan.deploy.workload import DeployJob, draw_batches

SAMPLED_BATCHES = 100
"""Batches whose lengths are looked at, as LobRA does."""


def expected_batch(jobs: Sequence[DeployJob], seed: int = 0) -> Buckets:
    """A batch of all jobs with the lengths of a hundred, in the buckets that suit those best.

    The longest sample that may come is among them, so that every plan has a replica for it.
    """
    lengths = [length for batch in draw_batches(jobs, SAMPLED_BATCHES, seed) for length in batch]
    lengths.append(max(job.lengths.longest for job in jobs))
    return choose_buckets(lengths).expected(sum(job.batch_size for job in jobs))
