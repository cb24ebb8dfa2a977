"""Mean loss and token accuracy on evaluation samples: one pass of the frozen model serves all jobs that are due."""

from __future__ import annotations

from collections.abc import Sequence

from weft.backbone.backbone import Backbone
from weft.backbone.packed import Placed, pack_samples
from weft.data.sample import Sample
from weft.objectives.metrics import MeanScores, Tally

ScoreRequest = tuple[int | None, Sequence[Sample]]
"""A slot (None: the bare backbone) and what it is evaluated on."""


def mean_scores(backbone: Backbone, requests: Sequence[ScoreRequest], capacity: int, row_tile: int) -> list[MeanScores]:
    """Per request its means, summed sample by sample in the given order; NaN if nothing is supervised."""
    placed = [(which, Placed(s, slot)) for which, (slot, samples) in enumerate(requests) for s in samples]
    tallies = [Tally() for _ in requests]
    start = 0
    while start < len(placed):
        end, tokens = start, 0
        while end < len(placed) and (end == start or tokens + placed[end][1].sample.length <= capacity):
            tokens += placed[end][1].sample.length
            end += 1
        batch = pack_samples([p for _, p in placed[start:end]], row_tile, backbone.device)
        for (which, _), score in zip(placed[start:end], backbone.scores(batch, row_tile), strict=True):
            tallies[which].add(score)
        start = end
    return [tally.means() for tally in tallies]
