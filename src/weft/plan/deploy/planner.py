"""The replicas of a cluster that finish the expected batch soonest (LobRA's equation 2).

    min over plans p of  step(p),    step(p) = the balanced dispatch of the expected batch over the replicas of p

The integer program over whole clusters gives a first plan and a bound for all; alike replicas are tried beside it.
Where there are few enough plans, all are listed with lower bounds, and the one with the lowest is tried next: its
linear relaxation, which sharpens the bounds of all others, then the dispatch unless that rules the plan out. The search
ends when every plan left is bound to be slower. With too many plans, or with weak bounds because replicas get a few
samples each, the best plan so far is improved by exchanging replicas of one kind for those of another. Idle replicas
are dropped at the end. Deterministic but for the budget of processor seconds, which ends the search with a proven gap.

Baselines: alike replicas for all jobs at once (Task-Fused), and one job after another: Task-Sequential on the best
alike replicas for each, LobRA-Sequential on the best unlike ones.
"""

from __future__ import annotations

import bisect
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from weft.plan.deploy.buckets import IntArray
from weft.plan.deploy.dispatch import Relaxed, dispatch, dispatch_evenly, relax
from weft.plan.deploy.fleet import Dispatch, Fleet
from weft.plan.deploy.plans import PlanBounds, alike_counts, all_plans, num_plans, relaxed_plan
from weft.plan.deploy.types import DeployJob, Deployment, DeployProblem, ReplicaKind, expected_batch

MAX_LISTED = 400_000
"""Plans up to which all are listed; beyond, the first plan is improved."""
BUDGET_S = 10.0


def plan_deployment(problem: DeployProblem, *, budget_s: float = BUDGET_S) -> Deployment:
    return best_deployments(problem, 1, budget_s=budget_s)[0]


def best_deployments(problem: DeployProblem, most: int, *, budget_s: float = BUDGET_S) -> list[Deployment]:
    """The best plan for an expected batch, then the next best that were tried, at most `most` in all."""
    search = _Search(problem, time.process_time() + budget_s)
    first = relaxed_plan(problem, budget_s=budget_s / 2)
    search.bound_s = first.bound_s
    for plan in (first.counts, *alike_counts(problem)):
        search.attempt(np.array(plan))
    total = num_plans(problem)
    if total <= MAX_LISTED:
        search.go_through(all_plans(problem), search.deadline_s - budget_s / 4)
    if not search.is_complete:
        search.exchange()
    assert search.found, "the first plan holds every sample"
    busy = (without_idle(problem, counts, found) for counts, found in search.found)
    # Plans that differ only in idle replicas are the same.
    return [
        Deployment(
            problem=problem,
            counts=counts,
            dispatch=found,
            bound_s=search.bound_s,
            num_plans=float(total),
            num_tried=len(search.found),
            is_complete=search.is_complete,
        )
        for counts, found in itertools.islice(dict(busy).items(), most)
    ]


def without_idle(problem: DeployProblem, counts: Sequence[int], shared: Dispatch) -> tuple[tuple[int, ...], Dispatch]:
    """A plan without the replicas that get no sample of its batch."""
    kinds = [kind for kind, count in enumerate(counts) for _ in range(count)]
    busy = [index for index, own in enumerate(shared.counts) if any(own)]
    left = Dispatch(
        counts=tuple(shared.counts[index] for index in busy),
        seconds=tuple(shared.seconds[index] for index in busy),
        bound_s=shared.bound_s,
        homes=tuple(busy.index(home) for home in shared.homes),
    )
    return tuple(sum(kinds[index] == kind for index in busy) for kind in range(len(problem.kinds))), left


class _Search:
    def __init__(self, problem: DeployProblem, deadline_s: float) -> None:
        self.problem = problem
        self.deadline_s = deadline_s
        self.found: list[tuple[tuple[int, ...], Dispatch]] = []
        self.bound_s = 0.0
        self.tried_s = math.inf
        """Lower bound of any dispatch of the tried plans: the ones found need not be their best."""
        self.is_complete = False
        """True if every plan was tried or cannot beat the best."""
        self.seen: set[tuple[int, ...]] = set()

    def attempt(self, plan_S: IntArray) -> Relaxed | None:
        """Solves a plan's relaxation, and its dispatch unless that rules it out; None for a plan seen before."""
        counts = tuple(int(count) for count in plan_S)
        if counts in self.seen:
            return None
        self.seen.add(counts)
        fleet = Fleet(self.problem.models(counts), self.problem.buckets)
        relaxed = relax(fleet, self.target_s)
        if relaxed.bound_s >= self.target_s:
            return relaxed
        # Two starts, one without regard to pipelines: no worse than the dispatch of a step.
        found = min(dispatch(fleet, relaxed), dispatch(fleet), key=lambda shared: shared.step_s)
        self.tried_s = min(self.tried_s, relaxed.bound_s)
        bisect.insort(self.found, (counts, found), key=lambda plan: plan[1].step_s)
        return relaxed

    @property
    def target_s(self) -> float:
        return self.found[0][1].step_s if self.found else math.inf

    def go_through(self, plans_PS: IntArray, deadline_s: float) -> None:
        """Tries the plan with the lowest bound until none can be better or time is up."""
        known = PlanBounds(self.problem, plans_PS, self.target_s)
        is_left = np.ones(len(plans_PS), dtype=np.bool_)
        while True:
            bounds_P = np.where(is_left, known.bounds_P, np.inf)
            row = int(np.argmin(bounds_P))
            self.is_complete = bool(bounds_P[row] >= self.target_s)
            if self.is_complete or time.process_time() > deadline_s:
                # Plans ruled out are not below the target; those left and tried are not below their bounds.
                self.bound_s = max(self.bound_s, min(self.target_s, self.tried_s, float(bounds_P[row])))
                return
            is_left[row] = False
            relaxed = self.attempt(plans_PS[row])
            if relaxed is not None:
                known.learn(plans_PS[row], relaxed)

    def exchange(self) -> None:
        """Tries plans one exchange away from the best, while one is better."""
        before_s = math.inf
        while time.process_time() < self.deadline_s and self.target_s < before_s:
            before_s = self.target_s
            for plan in self._neighbours(self.found[0][0]):
                self.attempt(plan)
                is_late = time.process_time() > self.deadline_s
                if is_late or self.target_s < before_s or before_s <= self.bound_s:
                    break

    def _neighbours(self, counts: tuple[int, ...]) -> Iterator[IntArray]:
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


def plan_alike(problem: DeployProblem) -> Deployment:
    """The best plan of replicas of one layout for the expected batch, which is divided evenly."""
    plans = alike_plans(problem)
    best = min(plans, key=lambda plan: plan.step_s)
    return replace(best, num_plans=float(len(plans)), num_tried=len(plans), is_complete=True)


def alike_plans(problem: DeployProblem) -> list[Deployment]:
    """A plan for every layout that holds all samples."""
    found = []
    for counts in alike_counts(problem):
        shared = dispatch_evenly(Fleet(problem.models(counts), problem.buckets))
        found.append(Deployment(problem, counts, shared, shared.bound_s, 1.0, 1))
    return found


def plan_each(
    kinds: Sequence[ReplicaKind],
    pools: Mapping[str, int],
    jobs: Sequence[DeployJob],
    *,
    are_alike: bool,
    budget_s: float = BUDGET_S,
) -> list[Deployment]:
    """A plan for every job by itself on all GPUs, to run one after another; the budget is per job."""
    problems = [DeployProblem(tuple(kinds), pools, expected_batch([job])) for job in jobs]
    return [plan_alike(own) if are_alike else plan_deployment(own, budget_s=budget_s) for own in problems]
