"""Whether a cluster changes its replicas when jobs come and go.

    redeploy if   steps · (step(now) − step(planned))  >  moving        or the replicas of now cannot hold a sample

`steps` are the global batches until the set of jobs changes again, as far as that is known: the fewest that a job has
left. Moving is what training stands still for: every adapter with its optimizer is written and read again, and where
a replica is of a kind that there are too few of, the backbone is loaded. Replicas of a kind that stays are kept, so
nothing else of the backbone moves. Both are measured by whoever asks; a step's seconds are the balanced dispatch of the
expected batch. Pure and deterministic but for the planner's budget, so it can run beside training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.errors import PlanError
from weft.plan.deploy.planner import BUDGET_S, plan_deployment
from weft.plan.deploy.types import Deployment, DeployProblem, ReplicaKind
from weft.plan.dispatch import Fleet, dispatch


@dataclass(frozen=True)
class MoveCost:
    """What it takes to change replicas, in seconds."""

    save_s: float
    """All adapters with their optimizers written at a step boundary, and read again where they go on."""
    load_s: float
    """The backbone loaded by replicas that are new; all of them at once."""

    def __post_init__(self) -> None:
        if self.save_s < 0 or self.load_s < 0:
            raise PlanError(f"moving takes {self.save_s} s to save and {self.load_s} s to load; use 0 or more.")


@dataclass(frozen=True)
class Replan:
    """What a cluster does after its jobs have changed."""

    planned: Deployment
    """The best plan for the jobs there are now."""
    started: tuple[ReplicaKind, ...]
    """Replicas that it has and the cluster has not."""
    stopped: tuple[ReplicaKind, ...]
    """Replicas that the cluster has and it has not."""
    now_s: float | None
    """A step on the replicas of now; None if they cannot hold a sample of the jobs."""
    move_s: float
    num_steps: int

    @property
    def gain_s(self) -> float | None:
        """Saved by the new plan over all steps, moving not counted; None if nothing else is possible."""
        return None if self.now_s is None else self.num_steps * (self.now_s - self.planned.step_s)

    @property
    def moves(self) -> bool:
        """Whether the cluster is redeployed."""
        if not self.started and not self.stopped:
            return False
        return self.gain_s is None or self.gain_s > self.move_s

    @property
    def reason(self) -> str:
        """Why, in one sentence."""
        if not self.started and not self.stopped:
            return f"{self.planned} is still the best plan."
        if self.gain_s is None:
            longest = self.planned.problem.buckets.bounds[-1]
            return f"samples of up to {longest:,} tokens fit on no replica there is; {self.planned} holds them."
        saved = f"would save {self.gain_s:,.3g} s in {self.num_steps:,} steps"
        if self.moves:
            return f"{self.planned} {saved}, and moving takes {self.move_s:,.3g} s."
        return f"{self.planned} {saved}; moving takes {self.move_s:,.3g} s, so nothing moves."


def replan(
    replicas: Sequence[ReplicaKind],
    problem: DeployProblem,
    num_steps: int,
    cost: MoveCost,
    *,
    budget_s: float = BUDGET_S,
) -> Replan:
    """What a cluster with these replicas does for the jobs of a problem, which train so many steps at least."""
    if num_steps < 0:
        raise PlanError(f"{num_steps} steps are left; 0 or more.")
    planned = plan_deployment(problem, budget_s=budget_s)
    started, stopped = _without(planned.replicas, replicas), _without(replicas, planned.replicas)
    move_s = cost.save_s + (cost.load_s if started else 0.0)
    return Replan(planned, started, stopped, _step_s(replicas, problem), move_s, num_steps)


def _without(replicas: Sequence[ReplicaKind], others: Sequence[ReplicaKind]) -> tuple[ReplicaKind, ...]:
    """Those of the first that have no counterpart of their layout and pool among the others."""
    left = [(kind.layout, kind.pool) for kind in others]
    found = []
    for kind in replicas:
        if (kind.layout, kind.pool) in left:
            left.remove((kind.layout, kind.pool))
        else:
            found.append(kind)
    return tuple(found)


def _step_s(replicas: Sequence[ReplicaKind], problem: DeployProblem) -> float | None:
    """A step on given replicas, as the new jobs make them; None if a sample fits on none."""
    known = {(kind.layout, kind.pool): kind.model for kind in problem.kinds}
    models = [known.get((kind.layout, kind.pool), kind.model) for kind in replicas]
    if max((model.most_tokens for model in models), default=0) < problem.buckets.bounds[-1]:
        return None
    return dispatch(Fleet.of(models, problem.buckets)).step_s
