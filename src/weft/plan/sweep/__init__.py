"""Which configurations of a sweep train together, on how many GPUs, and when."""

from weft.plan.sweep.planner import plan_sweep
from weft.plan.sweep.types import Configuration, Pack, SweepPlan

__all__ = ["Configuration", "Pack", "SweepPlan", "plan_sweep"]
