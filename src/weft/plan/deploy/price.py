"""What a replica of any layout takes, fitted from a cost model as from a profile (LobRA's appendix D).

The cost model is asked for padded batches of many sizes and lengths, and t(b, s) is fitted to the answers by
`cost/padded.py`; a `ProfiledCost` makes it a fit of what was measured. The slowest stage counts, with the transfers to
the next one.
"""

from __future__ import annotations

from weft.plan.cost.padded import PaddedBatch, fit_padded
from weft.plan.cost.types import CostModel, slot_seconds
from weft.plan.dispatch import ReplicaTime
from weft.plan.layout import ReplicaLayout

PROBED_LENGTHS = (64, 256, 1024, 4096, 16_384, 65_536)


def fit_replica(
    cost: CostModel,
    layout: ReplicaLayout,
    num_layers: int,
    most_tokens: int,
    *,
    scale: float = 1.0,
    is_packed: bool = False,
) -> ReplicaTime:
    """A replica of a layout that `cost` describes, with chunks of up to so many tokens; seconds count `scale` times."""
    passes = num_layers / layout.stages
    batches = []
    for length in [*(length for length in PROBED_LENGTHS if length < most_tokens), most_tokens]:
        most = most_tokens // length
        for size in sorted({1, 2, -(-most // 8), -(-most // 2), most}):
            if size <= most:
                batches.append(PaddedBatch(size, length, passes, scale * chunk_s(cost, layout, size, length)))
    return ReplicaTime(layout, most_tokens, fit_padded(batches), num_layers, is_packed)


def chunk_s(cost: CostModel, layout: ReplicaLayout, size: int, length: int) -> float:
    """Forward and backward of one padded chunk on the slowest stage."""
    return slot_seconds(cost, layout.stages, [length] * size)
