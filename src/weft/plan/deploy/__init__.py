"""Which replicas of which layouts a cluster gets: unlike ones, so that short samples need not pay for long ones."""

from weft.plan.deploy.planner import plan_deployment
from weft.plan.deploy.types import Deployment, DeployProblem, ReplicaKind

__all__ = ["DeployProblem", "Deployment", "ReplicaKind", "plan_deployment"]
