"""Packing: which samples of which jobs share a microbatch, for one stage and for pipelines."""

from weft.plan.pack.greedy import pack
from weft.plan.pack.planners import planner_named
from weft.plan.pack.rounds import pack_rounds
from weft.plan.pack.types import PackedRound, RoundLimits, RoundPlan

__all__ = ["PackedRound", "RoundLimits", "RoundPlan", "pack", "pack_rounds", "planner_named"]
