"""Which job trains on which replica of the backbone.

`place` decides at step boundaries; `violations` checks any placement.
"""

from weft.plan.place.check import violations
from weft.plan.place.planner import place
from weft.plan.place.types import MOVE_S, Candidate, JobPlacement, Move, Replica

__all__ = ["MOVE_S", "Candidate", "JobPlacement", "Move", "Replica", "place", "violations"]
