"""What of fusion no command executes yet: chunks of one length, orders of operators that hide stalls."""

from benchmarks.planning.fusion.align import align
from benchmarks.planning.fusion.interleave import interleave, tensor_parallel_clock
from benchmarks.planning.fusion.operators import FusedOperator, Subgraph, segment

__all__ = [
    "FusedOperator",
    "Subgraph",
    "align",
    "interleave",
    "segment",
    "tensor_parallel_clock",
]
