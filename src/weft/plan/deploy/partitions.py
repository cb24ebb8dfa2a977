"""All plans of a cluster: how many replicas of each kind, so that no GPUs are left that another replica could use.

These are the partitions of each pool's GPUs into the sizes of its kinds. One more replica slows no plan down, so plans
that leave room for one need not be looked at. `num_plans` counts them by dynamic programming without making them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weft.plan.deploy.types import DeployProblem
from weft.plan.dispatch.replica_time import IntArray


def num_plans(problem: DeployProblem) -> int:
    """How many plans there are."""
    product = 1
    for pool, num_gpus in problem.pools.items():
        sizes = [kind.num_gpus for kind in problem.kinds if kind.pool == pool]
        if not sizes:
            continue
        ways = [1] + [0] * num_gpus
        for size in sizes:
            for used in range(size, num_gpus + 1):
                ways[used] += ways[used - size]
        product *= sum(ways[max(0, num_gpus - min(sizes) + 1) :]) if min(sizes) <= num_gpus else 1
    return product


def all_plans(problem: DeployProblem) -> IntArray:
    """Every plan as a row of replicas by kind, the kinds in the problem's order."""
    rows = np.zeros((1, len(problem.kinds)), dtype=np.int64)
    for pool, num_gpus in problem.pools.items():
        own = [place for place, kind in enumerate(problem.kinds) if kind.pool == pool]
        if not own:
            continue
        parts = _partitions([problem.kinds[place].num_gpus for place in own], num_gpus)
        rows = np.repeat(rows, len(parts), axis=0)
        rows[:, own] = np.tile(parts, (len(rows) // len(parts), 1))
    return rows


def alike_plans(problem: DeployProblem) -> list[tuple[int, ...]]:
    """For every layout that holds all samples somewhere: replicas of it wherever it does, as many as there is room."""
    longest, found = problem.buckets.bounds[-1], list[tuple[int, ...]]()
    for layout in dict.fromkeys(kind.layout for kind in problem.kinds):
        counts = tuple(
            problem.pools.get(kind.pool, 0) // kind.num_gpus
            if kind.layout == layout and kind.model.most_tokens >= longest
            else 0
            for kind in problem.kinds
        )
        found += [counts] if any(counts) else []
    return found


def _partitions(sizes: Sequence[int], num_gpus: int) -> IntArray:
    """Counts of each size that leave less room than the smallest size takes."""
    order = np.argsort(sizes, kind="stable")[::-1]
    rows = np.zeros((1, len(sizes)), dtype=np.int64)
    left = np.array([num_gpus])
    for step, place in enumerate(order):
        size = sizes[place]
        most = left // size
        if step == len(order) - 1:
            rows[:, place] = most
            return rows
        repeats = most + 1
        start = np.repeat(np.cumsum(repeats) - repeats, repeats)
        count = np.arange(repeats.sum()) - start
        rows = np.repeat(rows, repeats, axis=0)
        rows[:, place] = count
        left = np.repeat(left, repeats) - count * size
    return rows
