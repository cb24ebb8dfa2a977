"""The linear relaxation of dispatch: samples may be split, chunks are always full, pipelines take no time to fill.

    min t    s.t.  Σ_i d_ij = B_j,    Σ_j w_ij · d_ij ≤ p_i · t,    d ≥ 0

for kinds i of alike replicas, p_i of each, and w_ij the seconds of a sample in full chunks. No dispatch takes less than
its optimum, because every other way of running a sample takes at least w_ij; nor less than any one sample takes by
itself where it is fastest, nor less than a job that has one home takes where it is alone and fastest. Solved by HiGHS
in a few milliseconds. The prices of its second constraints say what a second of each kind is worth: with them,
`plan/deploy/bounds.py` bounds other plans as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from weft.errors import PlanError
from weft.plan.dispatch.fleet import Fleet
from weft.plan.dispatch.replica_time import FloatArray


@dataclass(frozen=True)
class Relaxed:
    """The optimum of the relaxation."""

    bound_s: float
    """No dispatch takes less."""
    prices_S: FloatArray
    """What a second of one replica of each kind is worth."""
    counts_SR: FloatArray
    """Samples by kind of replica, not whole."""


def relax(fleet: Fleet, below_s: float = math.inf) -> Relaxed:
    """Solves the relaxation; where only dispatches that end before `below_s` matter, pipelines that fill count too."""
    from scipy.optimize import linprog

    _, first = np.unique(fleet.kind_K, return_index=True)
    copies = np.bincount(fleet.kind_K)
    kind, bucket = np.nonzero(fleet.holds_KR[first])
    num, num_kinds = len(kind), len(copies)
    counts = np.asarray(fleet.buckets.counts)
    columns = np.arange(num)
    # Dense: so small a program is solved sooner than a sparse matrix is made.
    loads = np.zeros((num_kinds, num + 1))
    seconds_SR = fleet.sample_s_KR[first] * fleet.stretch_K(below_s)[first][:, None]
    loads[kind, columns] = seconds_SR[kind, bucket] / copies[kind]
    loads[:, num] = -1.0
    shares = np.zeros((len(counts), num + 1))
    shares[bucket, columns] = 1.0
    objective = np.zeros(num + 1)
    objective[-1] = 1.0
    found = linprog(objective, A_ub=loads, b_ub=np.zeros(num_kinds), A_eq=shares, b_eq=counts, method="highs")
    if found.x is None:
        raise PlanError(f"the relaxation has no solution ({found.message}).", where="dispatch")
    shares_SR = np.zeros((num_kinds, len(counts)))
    shares_SR[kind, bucket] = found.x[:-1]
    alone_s = float(np.where(fleet.holds_KR, fleet.slope_KR + fleet.base_KR, np.inf).min(axis=0).max())
    homes_s = float(fleet.job_s_KJ.min(axis=0).max()) if len(fleet.home_JR) else 0.0
    return Relaxed(min(max(float(found.fun), alone_s, homes_s), below_s), -found.ineqlin.marginals / copies, shares_SR)
