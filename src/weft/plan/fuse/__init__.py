"""Fusion in space and time: tasks that run as one batch, buckets that share a clock, orders that hide stalls."""

from weft.plan.fuse.align import Alignment, align
from weft.plan.fuse.buckets import Balance, balance
from weft.plan.fuse.interleave import LaunchOrder, interleave, tensor_parallel_clock
from weft.plan.fuse.operators import FusedOperator, Subgraph, segment
from weft.plan.fuse.partition import Fusion, fuse, fuse_by_count
from weft.plan.fuse.plan import FusionPlan, plan_fusion
from weft.plan.fuse.tasks import FusedTask, FuseTask, Pipe
from weft.plan.fuse.template import Launch, Template, build_template

__all__ = [
    "Alignment",
    "Balance",
    "FuseTask",
    "FusedOperator",
    "FusedTask",
    "Fusion",
    "FusionPlan",
    "Launch",
    "LaunchOrder",
    "Pipe",
    "Subgraph",
    "Template",
    "align",
    "balance",
    "build_template",
    "fuse",
    "fuse_by_count",
    "interleave",
    "plan_fusion",
    "segment",
    "tensor_parallel_clock",
]
