"""Lower bounds on the steps of many plans at once: LobRA's Theorem 1 without its assumption, and sharper ones.

Let w_ij be the seconds of a sample of bucket j in full chunks on a replica of kind i, and v_i ≥ 0 any prices for a
second of such a replica. A plan with p_i replicas of kind i that ends by t uses at most p_i · t seconds of kind i, and
at least w_ij for every sample there; so it holds that

    t · Σ_i p_i · v_i   ≥   Σ_j B_j · min over the plan's kinds i of  w_ij · v_i

With v_i = n_i, a replica's GPUs, this is Theorem 1: the right side is then the length-based dispatch, wherever the
smallest kind that holds a sample is the cheapest. With v_i = n_i only for kinds that hold bucket m, and 0 for others,
it says that long samples have only large replicas to run on. Nor does a plan end before any one sample, or any job that
has one home, does where it is fastest. With the prices of a plan whose relaxation was solved it is that plan's own
bound, and a sharp one for plans like it. Where only plans matter that beat a step already found, w_ij has its part of
the time that pipelines take to fill (`Fleet.stretch_K`). Nothing is assumed of how kinds compare: the best plan is
never among those whose bound is above a step already found.
"""

from __future__ import annotations

import math

import numpy as np

from weft.plan.deploy.types import DeployProblem
from weft.plan.dispatch.linear import Relaxed
from weft.plan.dispatch.replica_time import FloatArray, IntArray


class PlanBounds:
    """The best known lower bound of every plan whose step is below `below_s`; others may have any."""

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
        """Raises the bounds to those that these prices give."""
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
        """What a sample's seconds are worth by kind and bucket; infinite where it does not fit."""
        priced_SR: FloatArray = np.where(self.holds_SR, self.sample_s_SR * prices_S[:, None], np.inf)
        return priced_SR

    def _cheapest(self, priced_SR: FloatArray) -> FloatArray:
        """By set of kinds and bucket, the least over the kinds of the set; infinite where none holds the bucket."""
        found_MR: FloatArray = np.where(self._used_MS[:, :, None], priced_SR[None], np.inf).min(axis=1)
        return found_MR
