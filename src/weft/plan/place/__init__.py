"""Placement: `assign_jobs` decides at step boundaries which job trains on which replica of the backbone."""

from weft.plan.place.planner import assign_jobs
from weft.plan.place.pool import MOVE_S, Candidate, JobPlacement, Move, Replica

__all__ = ["MOVE_S", "Candidate", "JobPlacement", "Move", "Replica", "assign_jobs"]
