"""All plans of a cluster: numbers of replicas of each kind that leave no room for another replica.

These are the partitions of each pool's GPUs into the sizes of its kinds. One more replica slows no plan down, so plans
with room for one can be ignored. `num_plans` counts them by dynamic programming without building them.

Lower bounds of the steps of many plans at once: LobRA's Theorem 1 without its assumption, and sharper ones.

Let w_ij be the seconds of a sample of bucket j in full chunks on a replica of kind i, and v_i ≥ 0 any prices for a
second of such a replica. A plan with p_i replicas of kind i that ends by t uses at most p_i · t seconds of kind i, and
at least w_ij for every sample there; so it holds that

    t · Σ_i p_i · v_i   ≥   Σ_j B_j · min over the plan's kinds i of  w_ij · v_i

With v_i = n_i, a replica's GPUs, this is Theorem 1: the right side is then the length-based dispatch, wherever the
smallest kind that holds a sample is the cheapest. With v_i = n_i only for kinds that hold bucket m, and 0 for others,
it bounds long samples, which only large replicas can run. Nor does a plan end before any one sample, or any job that
has one home, does where it is fastest. The prices of a plan whose relaxation was solved give its own bound, and a sharp
one for similar plans. Where only plans faster than a known step matter, w_ij includes its part of the time to fill
pipelines (`Fleet.stretch_K`). No order among kinds is assumed: the best plan is never among those whose bound is above
a known step.

The best plan of the relaxed problem by one integer program, whatever the number of GPUs.

With u steps a second and e_ij samples of bucket j a second on all replicas of kind i, the relaxed problem is linear:

    max u    s.t.  Σ_i e_ij = B_j · u,    Σ_j w_ij · e_ij ≤ p_i · (1 − f_i),    Σ_{i in pool} n_i · p_i ≤ its GPUs

with p whole. f_i is the share of a step that a pipeline takes to fill; it depends on the step, so the program is solved
again with the step it gave. Without f (all 0) no plan has more than u steps a second: 1 / u bounds all plans. HiGHS
needs milliseconds to seconds: there is one integer per kind, not per GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.plan.deploy.buckets import FloatArray, IntArray
from weft.plan.deploy.dispatch import Relaxed
from weft.plan.deploy.types import DeployProblem


def num_plans(problem: DeployProblem) -> int:
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
    rows = np.zeros((1, len(problem.kinds)), dtype=np.int64)
    for pool, num_gpus in problem.pools.items():
        own = [index for index, kind in enumerate(problem.kinds) if kind.pool == pool]
        if not own:
            continue
        parts = _partitions([problem.kinds[index].num_gpus for index in own], num_gpus)
        rows = np.repeat(rows, len(parts), axis=0)
        rows[:, own] = np.tile(parts, (len(rows) // len(parts), 1))
    return rows


def alike_counts(problem: DeployProblem) -> list[tuple[int, ...]]:
    """Counts of replicas, for every layout that can hold all samples: as many as fit."""
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
    """Counts of each size that leave less room than the smallest size needs."""
    order = np.argsort(sizes, kind="stable")[::-1]
    rows = np.zeros((1, len(sizes)), dtype=np.int64)
    left = np.array([num_gpus])
    for step, index in enumerate(order):
        size = sizes[index]
        most = left // size
        if step == len(order) - 1:
            rows[:, index] = most
            return rows
        repeats = most + 1
        start = np.repeat(np.cumsum(repeats) - repeats, repeats)
        count = np.arange(repeats.sum()) - start
        rows = np.repeat(rows, repeats, axis=0)
        rows[:, index] = count
        left = np.repeat(left, repeats) - count * size
    return rows


class PlanBounds:
    """The best known lower bound of every plan whose step is below `below_s`; arbitrary for others."""

    def __init__(self, problem: DeployProblem, plans_PS: IntArray, below_s: float = math.inf) -> None:
        self.plans_PS = plans_PS
        self.counts_R = np.asarray(problem.buckets.counts)
        sample_s_SR = problem.sample_s_SR(below_s)
        self.holds_SR = np.isfinite(sample_s_SR)
        self.sample_s_SR = np.where(self.holds_SR, sample_s_SR, 0.0)
        # Plans with the same kinds have the same cheapest kinds.
        used_PS = plans_PS > 0
        masks = used_PS @ (1 << np.arange(plans_PS.shape[1], dtype=np.int64))
        _, first, self._set_P = np.unique(masks, return_index=True, return_inverse=True)
        self._used_MS = used_PS[first]
        whole_s = np.concatenate([problem.alone_s_SR, problem.job_s_SJ], axis=1)
        self.bounds_P = self._cheapest(whole_s).max(axis=1)[self._set_P]
        for holds_S in np.unique(self.holds_SR, axis=1).T:
            self.sharpen(problem.gpus_S * holds_S)

    def sharpen(self, prices_S: FloatArray) -> None:
        """Raises the bounds to those of these prices."""
        work_M = self._cheapest(self._priced(prices_S)) @ self.counts_R
        worth_P = self.plans_PS @ prices_S
        with np.errstate(divide="ignore", invalid="ignore"):
            found_P = work_M[self._set_P] / worth_P
        self.bounds_P = np.fmax(self.bounds_P, found_P)

    def learn(self, plan_S: IntArray, relaxed: Relaxed) -> None:
        """Sharpens by the prices of a plan's relaxation; kinds it lacks are priced so that they change no minimum."""
        is_used = plan_S > 0
        prices_S = np.zeros(len(plan_S))
        prices_S[is_used] = relaxed.prices_S
        work_R = self._priced(prices_S)[is_used].min(axis=0)
        lacking = np.flatnonzero(~is_used)
        slowest = np.where(self.holds_SR[lacking], self.sample_s_SR[lacking], np.inf)
        prices_S[lacking] = (work_R / slowest).max(axis=1)
        self.sharpen(prices_S)

    def _priced(self, prices_S: FloatArray) -> FloatArray:
        """Priced seconds of a sample by kind and bucket; infinite where it does not fit."""
        priced_SR: FloatArray = np.where(self.holds_SR, self.sample_s_SR * prices_S[:, None], np.inf)
        return priced_SR

    def _cheapest(self, priced_SR: FloatArray) -> FloatArray:
        """Least priced seconds by set of kinds and bucket; infinite where no kind of the set holds the bucket."""
        found_MR: FloatArray = np.where(self._used_MS[:, :, None], priced_SR[None], np.inf).min(axis=1)
        return found_MR


REL_GAP = 1e-4
ROUNDS = 4
MIN_LIMIT_S = 10.0
"""Least seconds of a solve: HiGHS counts wall time, which other programs share; it needs a hundredth of it."""


@dataclass(frozen=True)
class RelaxedPlan:
    """The best plan of the relaxed problem, which need not be the best plan."""

    counts: tuple[int, ...]
    bound_s: float


def relaxed_plan(problem: DeployProblem, *, budget_s: float) -> RelaxedPlan:
    """The best plan with the time to fill pipelines, and a bound for all plans."""
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
    """Seconds of the shortest full chunk on each kind: the cost of one more stage in a step."""
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
    rows, cols, values = (np.concatenate(column) for column in zip(*parts, strict=True))
    matrix = coo_array((values, (rows, cols)), shape=(num_buckets + num_kinds + len(pools), num + num_kinds + 1))
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
        # Out of time: any plan that holds every sample.
        return RelaxedPlan(alike_counts(problem)[0], 0.0)
    counts = tuple(round(float(count)) for count in found.x[num : num + num_kinds])
    return RelaxedPlan(counts, scale / -min(float(found.mip_dual_bound), float(found.fun)))
