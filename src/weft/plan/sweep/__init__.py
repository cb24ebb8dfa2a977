"""Which configurations of a sweep train together, on how many GPUs, and when.

`plan_sweep` plans; `violations` checks any plan.
"""

from weft.plan.sweep.planner import plan_sweep
from weft.plan.sweep.types import Configuration, Pack, SweepPlan, violations

__all__ = ["Configuration", "Pack", "SweepPlan", "plan_sweep", "violations"]
