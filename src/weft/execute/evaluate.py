"""Mean loss and token accuracy on evaluation samples: one pass of the frozen model serves all jobs that are due."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weft.backbone.backbone import Backbone
from weft.backbone.packed import Placed, pack_samples
from weft.data.dataset import Dataset
from weft.objectives.metrics import MeanScores, Tally

ScoreRequest = tuple[int | None, Dataset]
"""A slot (None: the bare backbone) and what it is evaluated on."""


def mean_scores(backbone: Backbone, requests: Sequence[ScoreRequest], capacity: int, row_tile: int) -> list[MeanScores]:
    """Per request its means, summed sample by sample in the given order; NaN if nothing is supervised."""
    owners_of = np.repeat(np.arange(len(requests)), [data.num_groups for _, data in requests])
    groups = np.concatenate([np.arange(data.num_groups) for _, data in requests])
    tallies = [Tally() for _ in requests]
    start = 0
    while start < len(groups):
        end, tokens, placed, owners = start, 0, [], []
        path = backbone.path_of(requests[owners_of[start]][0])
        while end < len(groups):
            slot, data = requests[owners_of[end]]
            tokens += sum(data.member_lengths(int(groups[end])))
            if end > start and (tokens > capacity or backbone.path_of(slot) is not path):
                break
            members = data.members(int(groups[end]))
            placed += [Placed(m.sample, None if m.is_bare else slot, objective=data.judge) for m in members]
            owners += [owners_of[end]] * len(members)
            end += 1
        scores = backbone.scores(pack_samples(placed, row_tile, backbone.device), row_tile)
        for which, score in zip(owners, scores, strict=True):
            tallies[which].add(score)
        start = end
    return [tally.means() for tally in tallies]
