"""Fusion in space and time: tasks that run as one batch, buckets that share a clock, orders that hide stalls."""

from weft.plan.fuse.align import align
from weft.plan.fuse.interleave import interleave, tensor_parallel_clock
from weft.plan.fuse.operators import FusedOperator, Subgraph, segment
from weft.plan.fuse.partition import fuse, fuse_by_count
from weft.plan.fuse.plan import plan_fusion
from weft.plan.fuse.tasks import FusedTask, FuseTask, Pipe
from weft.plan.fuse.template import Template, build_template

__all__ = [
    "FuseTask",
    "FusedOperator",
    "FusedTask",
    "Pipe",
    "Subgraph",
    "Template",
    "align",
    "build_template",
    "fuse",
    "fuse_by_count",
    "interleave",
    "plan_fusion",
    "segment",
    "tensor_parallel_clock",
]
