"""Mean loss and token accuracy on evaluation samples: one pass of the frozen model serves all jobs that are due."""

from __future__ import annotations

from collections.abc import Sequence

from weft.backbone.backbone import Backbone
from weft.backbone.packed import Placed, pack_samples
from weft.data.dataset import Dataset
from weft.objectives.metrics import MeanScores, Tally

ScoreRequest = tuple[int | None, Dataset]
"""A slot (None: the bare backbone) and what it is evaluated on."""


def mean_scores(backbone: Backbone, requests: Sequence[ScoreRequest], capacity: int, row_tile: int) -> list[MeanScores]:
    """Per request its means, summed sample by sample in the given order; NaN if nothing is supervised."""
    groups = [
        (which, [Placed(m.sample, None if m.is_bare else slot, objective=data.judge) for m in data.members(index)])
        for which, (slot, data) in enumerate(requests)
        for index in range(data.num_groups)
    ]
    tallies = [Tally() for _ in requests]
    start = 0
    while start < len(groups):
        end, tokens, placed, owners = start, 0, [], []
        path = backbone.path_of(requests[groups[start][0]][0])
        while end < len(groups):
            which, group = groups[end]
            tokens += sum(item.sample.length for item in group)
            is_apart = backbone.path_of(requests[which][0]) is not path
            if end > start and (tokens > capacity or is_apart):
                break
            placed += group
            owners += [which] * len(group)
            end += 1
        scores = backbone.scores(pack_samples(placed, row_tile, backbone.device), row_tile)
        for which, score in zip(owners, scores, strict=True):
            tallies[which].add(score)
        start = end
    return [tally.means() for tally in tallies]
