"""Fusion in space and time: tasks that run as one batch, buckets that share a clock, orders that hide stalls."""

from benchmarks.planning.fusion.align import align
from benchmarks.planning.fusion.interleave import interleave, tensor_parallel_clock
from benchmarks.planning.fusion.operators import FusedOperator, Subgraph, segment
from benchmarks.planning.fusion.plan import plan_fusion
from benchmarks.planning.fusion.template import Template, build_template

__all__ = [
    "FusedOperator",
    "Subgraph",
    "Template",
    "align",
    "build_template",
    "interleave",
    "plan_fusion",
    "segment",
    "tensor_parallel_clock",
]
