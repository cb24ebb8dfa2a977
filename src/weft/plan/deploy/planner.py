"""Which replicas a cluster gets, so that the expected batch is done soonest (LobRA's equation 2).

    min over plans p of  step(p),    step(p) = the balanced dispatch of the expected batch over the replicas of p

The integer program over whole clusters gives a first plan and a bound for all. Where there are few enough plans, they
are all listed with lower bounds, and the one with the lowest is tried next: its linear relaxation, which sharpens the
bounds of all others, then the dispatch if that does not rule the plan out. The search ends when every plan left is
bound to be slower. Where there are too many, the first plan is improved by exchanging replicas of one kind for replicas
of another. Deterministic but for the budget, in seconds of a processor, which returns the best found with a proven gap.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import numpy as np

from weft.plan.deploy.bounds import PlanBounds
from weft.plan.deploy.partitions import all_plans, num_plans
from weft.plan.deploy.program import relaxed_plan
from weft.plan.deploy.types import Deployment, DeployProblem
from weft.plan.dispatch import Dispatch, Fleet, dispatch
from weft.plan.dispatch.linear import Relaxed, relax
from weft.plan.dispatch.replica_time import IntArray

MAX_LISTED = 400_000
"""Plans that are listed one by one; beyond it the first plan is improved."""
BUDGET_S = 10.0


def plan_deployment(problem: DeployProblem, *, budget_s: float = BUDGET_S) -> Deployment:
    """The best plan for an expected batch."""
    search = _Search(problem, time.process_time() + budget_s)
    first = relaxed_plan(problem, budget_s=budget_s / 2)
    search.bound_s = first.bound_s
    search.attempt(np.array(first.counts))
    total = num_plans(problem)
    if total <= MAX_LISTED:
        search.go_through(all_plans(problem))
    else:
        search.exchange()
    assert search.best is not None, "the first plan holds every sample"
    counts, found = search.best
    return Deployment(
        problem=problem,
        counts=counts,
        dispatch=found,
        bound_s=search.bound_s,
        num_plans=float(total),
        num_tried=search.num_tried,
        is_complete=search.is_complete,
    )


class _Search:
    """The best plan so far."""

    def __init__(self, problem: DeployProblem, deadline_s: float) -> None:
        self.problem = problem
        self.deadline_s = deadline_s
        self.best: tuple[tuple[int, ...], Dispatch] | None = None
        self.bound_s = 0.0
        self.num_tried = 0
        self.tried_s = math.inf
        """What no dispatch of the plans tried so far can be below: theirs need not be the best that there are."""
        self.is_complete = False
        """Every plan was tried, or cannot be better than the best so far."""
        self.seen: set[tuple[int, ...]] = set()

    @property
    def is_late(self) -> bool:
        """Whether the budget is spent."""
        return time.process_time() > self.deadline_s

    def attempt(self, plan_S: IntArray) -> Relaxed | None:
        """Solves a plan's relaxation, and finds its dispatch unless that rules it out; None for a plan seen before."""
        counts = tuple(int(count) for count in plan_S)
        if counts in self.seen:
            return None
        self.seen.add(counts)
        fleet = Fleet.of(self.problem.models(counts), self.problem.buckets)
        relaxed = relax(fleet) if self.best is None else relax(fleet, self.target_s)
        if self.best is not None and relaxed.bound_s >= self.target_s:
            return relaxed
        # From two starts, of which one knows nothing of pipelines: no worse than what a step's own dispatch finds.
        found = min(dispatch(fleet, relaxed), dispatch(fleet), key=lambda shared: shared.step_s)
        self.num_tried += 1
        self.tried_s = min(self.tried_s, relaxed.bound_s)
        if self.best is None or found.step_s < self.best[1].step_s:
            self.best = counts, found
        return relaxed

    @property
    def target_s(self) -> float:
        """A plan that cannot be below it need not be tried."""
        assert self.best is not None, "the first plan was tried before"
        return self.best[1].step_s

    def go_through(self, plans_PS: IntArray) -> None:
        """Tries the plan with the lowest bound until none left can be better."""
        known = PlanBounds(self.problem, plans_PS, self.target_s)
        is_left = np.ones(len(plans_PS), dtype=np.bool_)
        while True:
            bounds_P = np.where(is_left, known.bounds_P, np.inf)
            row = int(np.argmin(bounds_P))
            self.is_complete = bool(bounds_P[row] >= self.target_s)
            if self.is_complete or self.is_late:
                # Those ruled out are not below the target, those left and those tried not below their bounds.
                self.bound_s = max(self.bound_s, min(self.target_s, self.tried_s, float(bounds_P[row])))
                return
            is_left[row] = False
            relaxed = self.attempt(plans_PS[row])
            if relaxed is not None:
                known.learn(plans_PS[row], relaxed)

    def exchange(self) -> None:
        """Tries plans that differ from the best in one exchange, as long as one is better."""
        before_s = math.inf
        while not self.is_late and self.best is not None and self.best[1].step_s < before_s:
            before_s = self.best[1].step_s
            for plan in self._neighbours(self.best[0]):
                self.attempt(plan)
                if self.is_late or self.best[1].step_s < before_s or before_s <= self.bound_s:
                    break

    def _neighbours(self, counts: tuple[int, ...]) -> Iterator[IntArray]:
        """Plans with some replicas of one kind for as many GPUs of another kind of its pool."""
        kinds = self.problem.kinds
        for source, given in enumerate(kinds):
            for target, taken in enumerate(kinds):
                if source == target or given.pool != taken.pool:
                    continue
                both = int(np.lcm(given.num_gpus, taken.num_gpus))
                leaving = both // given.num_gpus
                if counts[source] < leaving:
                    continue
                plan = np.array(counts)
                plan[source] -= leaving
                plan[target] += both // taken.num_gpus
                if self._holds_all(plan):
                    yield plan

    def _holds_all(self, plan_S: IntArray) -> bool:
        longest = max(kind.model.most_tokens for kind, count in zip(self.problem.kinds, plan_S, strict=True) if count)
        return longest >= self.problem.buckets.bounds[-1]
