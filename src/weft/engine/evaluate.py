"""Mean loss of jobs on their evaluation samples, all due jobs packed together."""

from __future__ import annotations

from collections.abc import Sequence

from weft.backbone.backbone import Backbone
from weft.backbone.packed import Placed, pack_samples
from weft.data.sample import Sample


def mean_losses(
    backbone: Backbone, requests: Sequence[tuple[int | None, Sequence[Sample]]], capacity: int, row_tile: int
) -> list[float]:
    """Per (slot, samples): mean loss over the supervised tokens, summed sample by sample in the given order."""
    placed = [(which, Placed(s, slot)) for which, (slot, samples) in enumerate(requests) for s in samples]
    sums, counts = [0.0] * len(requests), [0] * len(requests)
    start = 0
    while start < len(placed):
        end, tokens = start, 0
        while end < len(placed) and (end == start or tokens + placed[end][1].sample.length <= capacity):
            tokens += placed[end][1].sample.length
            end += 1
        batch = pack_samples([p for _, p in placed[start:end]], row_tile, backbone.device)
        for (which, item), loss in zip(placed[start:end], backbone.losses(batch, row_tile), strict=True):
            sums[which] += loss
            counts[which] += item.sample.num_supervised
        start = end
    return [total / count if count else float("nan") for total, count in zip(sums, counts, strict=True)]
