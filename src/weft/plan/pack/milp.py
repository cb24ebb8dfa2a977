"""LoRAFusion's two-stage packing as mixed-integer programs (its Eq. 3 and 4), solved by HiGHS.

Stage 1: min Σ_b z_b; stage 2, with that many bins: min the smallest bin (by symmetry, the last). Both subject to

    Σ_b x_{s,b} = 1                      every sample s once
    Σ_{s of a} len(s) · x_{s,b} ≤ k_{a,b} · P     tokens of job a in bin b, padded to P
    Σ_a k_{a,b} · P ≤ capacity · z_b     and z_{b+1} ≤ z_b

NP-hard: a time limit returns the best found, and the bound proven so far. HiGHS is deterministic unless the limit
strikes. Tests compare with brute force on small instances.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.plan.pack.bins import Bins
from weft.plan.pack.types import RoundLimits
from weft.plan.types import Segment

_OUT_OF_TIME, _INFEASIBLE = 1, 2
"""Status of scipy.optimize.milp."""


@dataclass(frozen=True)
class Solved:
    """What a solve found: bins (None if none was found), and the lower bound of its objective."""

    bins: Bins | None
    bound: float


def min_bins(segments: Sequence[Segment], limits: RoundLimits, max_bins: int, time_limit_s: float) -> Solved:
    """Stage 1. A bound above max_bins proves that so few cannot hold the samples."""
    return _solve(segments, limits, max_bins, time_limit_s, is_count=True)


def min_smallest(segments: Sequence[Segment], limits: RoundLimits, num_bins: int, time_limit_s: float) -> Solved:
    """Stage 2: at most so many bins, the last as empty as possible; the bound is in tokens."""
    return _solve(segments, limits, num_bins, time_limit_s, is_count=False)


def _solve(
    segments: Sequence[Segment], limits: RoundLimits, num_bins: int, limit_s: float, *, is_count: bool
) -> Solved:
    from scipy.optimize import Bounds, milp

    jobs = sorted({s.job for s in segments})
    n, num_jobs, room = len(segments), len(jobs), limits.room // limits.padding_multiple
    num_x, num_k = n * num_bins, num_jobs * num_bins
    objective = np.zeros(num_x + num_k + num_bins)
    if is_count:
        objective[num_x + num_k :] = 1
    else:
        objective[num_x + (num_bins - 1) * num_jobs : num_x + num_k] = limits.padding_multiple
    upper = np.concatenate([np.ones(num_x), np.full(num_k, room), np.ones(num_bins)])
    lower = np.zeros(len(upper))
    if not is_count:
        lower[num_x + num_k :] = 1
    result = milp(
        objective,
        integrality=np.ones(len(upper)),
        bounds=Bounds(lower, upper),
        constraints=_constraints(segments, jobs, limits, num_bins),
        options={"time_limit": max(limit_s, 0.01)},
    )
    if result.status == _INFEASIBLE:
        return Solved(None, float("inf"))
    if result.x is None:
        return Solved(None, 0.0)
    x = np.round(result.x[:num_x]).reshape(n, num_bins).argmax(axis=1)
    bins = [[s for s, b in zip(segments, x.tolist(), strict=True) if b == place] for place in range(num_bins)]
    bound = float(result.mip_dual_bound) if result.status == _OUT_OF_TIME else float(result.fun)
    return Solved([own for own in bins if own], bound)


def _constraints(segments: Sequence[Segment], jobs: list[str], limits: RoundLimits, num_bins: int) -> Any:
    """Rows over the columns x (sample-major), k (bin-major) and z."""
    from scipy.optimize import LinearConstraint
    from scipy.sparse import coo_array

    n, num_jobs = len(segments), len(jobs)
    num_x, num_k = n * num_bins, len(jobs) * num_bins
    job = np.array([jobs.index(s.job) for s in segments])
    lengths = np.array([s.length for s in segments])
    sample, place = np.divmod(np.arange(num_x), num_bins)
    bin_of_k = np.arange(num_k) // num_jobs
    bins, pairs = np.arange(num_bins), np.arange(num_bins - 1)
    load_row, room_row, order_row = n, n + num_k, n + num_k + num_bins
    parts = [  # row, column, value
        (sample, np.arange(num_x), np.ones(num_x)),
        (load_row + place * num_jobs + job[sample], np.arange(num_x), lengths[sample]),
        (load_row + np.arange(num_k), num_x + np.arange(num_k), np.full(num_k, -limits.padding_multiple)),
        (room_row + bin_of_k, num_x + np.arange(num_k), np.full(num_k, limits.padding_multiple)),
        (room_row + bins, num_x + num_k + bins, np.full(num_bins, -limits.room)),
        (order_row + pairs, num_x + num_k + pairs + 1, np.ones(num_bins - 1)),
        (order_row + pairs, num_x + num_k + pairs, -np.ones(num_bins - 1)),
    ]
    rows, columns, values = (np.concatenate(column) for column in zip(*parts, strict=True))
    num_rows = order_row + num_bins - 1
    matrix = coo_array((values, (rows, columns)), shape=(num_rows, num_x + num_k + num_bins)).tocsr()
    lower = np.where(np.arange(num_rows) < n, 1.0, -np.inf)
    return LinearConstraint(matrix, lower, np.where(np.arange(num_rows) < n, 1.0, 0.0))
