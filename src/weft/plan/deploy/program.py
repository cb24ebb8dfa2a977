"""The best plan of the relaxed problem by one integer program, whatever the number of GPUs.

With u steps a second and e_ij samples of bucket j a second on all replicas of kind i, the relaxed problem is linear:

    max u    s.t.  Σ_i e_ij = B_j · u,    Σ_j w_ij · e_ij ≤ p_i · (1 − f_i),    Σ_{i in pool} n_i · p_i ≤ its GPUs

with p whole. f_i is the share of a step that a pipeline takes to fill; it depends on the step, so the program is solved
again with the step it found. Without f (all 0) no plan has more than u steps a second: 1 / u is a bound for all plans.
HiGHS needs milliseconds to seconds: there is one whole number per kind, not per GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.plan.deploy.partitions import alike_plans
from weft.plan.deploy.types import DeployProblem
from weft.plan.dispatch.replica_time import FloatArray

REL_GAP = 1e-4
ROUNDS = 4
MIN_LIMIT_S = 10.0
"""A solve gets at least that, because HiGHS counts seconds that other programs have: it needs a hundredth of it."""


@dataclass(frozen=True)
class RelaxedPlan:
    """The best plan of the relaxed problem."""

    counts: tuple[int, ...]
    bound_s: float
    """No plan's relaxed step is below it."""


def relaxed_plan(problem: DeployProblem, *, budget_s: float) -> RelaxedPlan:
    """The best plan with pipelines that take time to fill, and a bound that holds for all plans."""
    sample_s_SR = problem.sample_s_SR()
    bound = _solve(problem, sample_s_SR, np.zeros(len(problem.kinds)), budget_s / (ROUNDS + 1))
    fill_S = np.array([kind.layout.stages - 1 for kind in problem.kinds]) * _chunk_s(problem)
    step_s, counts = bound.bound_s, bound.counts
    for _ in range(ROUNDS if fill_S.any() and step_s else 0):
        found = _solve(problem, sample_s_SR, np.minimum(fill_S / step_s, 1.0), budget_s / (ROUNDS + 1))
        counts, before, step_s = found.counts, step_s, found.bound_s
        if step_s == 0 or abs(step_s / before - 1) < REL_GAP:
            break
    alone_s = float(np.concatenate([problem.alone_s_SR, problem.job_s_SJ], axis=1).min(axis=0).max())
    return RelaxedPlan(counts, max(bound.bound_s, alone_s))


def _chunk_s(problem: DeployProblem) -> FloatArray:
    """Seconds of the shortest full chunk on each kind: what one more stage adds to a step."""
    chunks = []
    for kind in problem.kinds:
        costs = kind.model.costs(problem.buckets)
        full = np.where(costs.size_R > 0, costs.slope_R * costs.size_R + costs.base_R, np.inf)
        chunks.append(float(full.min()) if np.isfinite(full).any() else 0.0)
    return np.array(chunks)


def _solve(problem: DeployProblem, sample_s_SR: FloatArray, fill_S: FloatArray, limit_s: float) -> RelaxedPlan:
    """Columns: e of every kind and bucket that go together, p of every kind, u."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    num_kinds, counts_R = len(problem.kinds), np.asarray(problem.buckets.counts)
    kind, bucket = np.nonzero(np.isfinite(sample_s_SR))
    pools = list(problem.pools)
    pool_S = np.array([pools.index(entry.pool) for entry in problem.kinds])
    num, num_buckets = len(kind), len(counts_R)
    kinds, columns = np.arange(num_kinds), np.arange(num)
    # Seconds of work are counted in units of one step of the whole cluster's worth, which keeps numbers near 1.
    scale = float(np.min(sample_s_SR, axis=0) @ counts_R)
    parts = [  # row, column, value
        (bucket, columns, 1.0 / counts_R[bucket]),
        (np.arange(num_buckets), np.full(num_buckets, num + num_kinds), -np.ones(num_buckets)),
        (num_buckets + kind, columns, sample_s_SR[kind, bucket] / scale),
        (num_buckets + kinds, num + kinds, fill_S - 1.0),
        (num_buckets + num_kinds + pool_S, num + kinds, problem.gpus_S),
    ]
    rows, places, values = (np.concatenate(column) for column in zip(*parts, strict=True))
    matrix = coo_array((values, (rows, places)), shape=(num_buckets + num_kinds + len(pools), num + num_kinds + 1))
    lower = np.concatenate([np.zeros(num_buckets), np.full(num_kinds + len(pools), -np.inf)])
    upper = np.concatenate([np.zeros(num_buckets + num_kinds), [float(problem.pools[pool]) for pool in pools]])
    objective = np.zeros(num + num_kinds + 1)
    objective[-1] = -1.0
    whole = np.concatenate([np.zeros(num), np.ones(num_kinds), [0.0]])
    found = milp(
        objective,
        integrality=whole,
        bounds=Bounds(0, np.inf),
        constraints=LinearConstraint(matrix.tocsr(), lower, upper),
        options={"time_limit": max(limit_s, MIN_LIMIT_S), "mip_rel_gap": REL_GAP},
    )
    if found.x is None or found.fun >= 0:
        # There was no time: any plan that holds every sample.
        return RelaxedPlan(alike_plans(problem)[0], 0.0)
    counts = tuple(round(float(count)) for count in found.x[num : num + num_kinds])
    return RelaxedPlan(counts, scale / -min(float(found.mip_dual_bound), float(found.fun)))
