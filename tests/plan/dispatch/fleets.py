"""Replicas that tests dispatch over: those of LobRA's Table 3, and small made-up ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from benchmarks.deploy.published import figure_4
from weft.plan.cost.fit import PaddedTime
from weft.plan.deploy.buckets import ReplicaTime
from weft.plan.deploy.fleet import Fleet
from weft.plan.layout import ReplicaLayout


def rated_fleet(plan: Sequence[int]) -> Fleet:
    """So many replicas of each layout of Table 3 without stages, for the batch of Figure 4."""
    problem = figure_4()
    return Fleet(problem.models(plan), problem.buckets)


def small_replicas(*, is_packed: bool = False) -> list[ReplicaTime]:
    """Three kinds: a small fast one, one with two stages, and a large slow one."""
    return [
        ReplicaTime(ReplicaLayout(), 200, PaddedTime((1e-6, 0, 1e-3, 0, 0, 0.02)), 4, is_packed),
        ReplicaTime(ReplicaLayout(stages=2), 400, PaddedTime((1e-6, 0, 1.1e-3, 0, 0, 0.02)), 4, is_packed),
        ReplicaTime(ReplicaLayout(tensor=4), 800, PaddedTime((3e-7, 0, 5e-4, 0, 0, 0.05)), 4, is_packed),
    ]


def equation_3(fleet: Fleet) -> float:
    """The optimum of LobRA's equation 3: whole samples per replica, the same on every replica of a kind."""
    _, first, copies = np.unique(fleet.kind_K, return_index=True, return_counts=True)
    pairs = [(kind, bucket) for kind, row in enumerate(first) for bucket in np.flatnonzero(fleet.holds_KR[row])]
    num = len(pairs) + 1
    rows, lower, upper = [], [], []
    for bucket, count in enumerate(fleet.buckets.counts):
        rows.append([*(copies[kind] if own == bucket else 0.0 for kind, own in pairs), 0.0])
        lower.append(count)
        upper.append(np.inf)
    for kind, row in enumerate(first):
        rows.append([*(fleet.sample_s_KR[row, bucket] if own == kind else 0.0 for own, bucket in pairs), -1.0])
        lower.append(-np.inf)
        upper.append(0.0)
    objective = np.zeros(num)
    objective[-1] = 1.0
    whole = np.array([1.0] * (num - 1) + [0.0])
    constraints = LinearConstraint(np.array(rows), lower, upper)
    found = milp(objective, constraints=constraints, integrality=whole, bounds=Bounds(0, np.inf))
    return float(found.fun)
