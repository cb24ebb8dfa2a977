"""Mean loss and token accuracy on evaluation samples: one pass of the frozen model serves all jobs that are due."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from weft.backbone.backbone import Backbone
from weft.backbone.packed import Placed, pack_samples
from weft.backbone.scores import PendingScores
from weft.data.dataset import Dataset
from weft.execute.protocol import EvaluationOutcome
from weft.kernels.device_event import DeviceEvent
from weft.objectives.metrics import MeanScores, Tally

ScoreRequest = tuple[int | None, Dataset]
"""A slot (None: the bare backbone) and what it is evaluated on."""


class EvaluationInFlight:
    """Evaluations that have been started behind all that the device had to do; nobody has waited for them."""

    def __init__(self, backbone: Backbone, requests: Sequence[ScoreRequest], capacity: int, row_tile: int) -> None:
        self._num_requests = len(requests)
        self._begun = DeviceEvent(backbone.device)
        self._running: list[tuple[list[int], PendingScores]] = []
        """Each microbatch with the request of each of its samples."""
        for owners, placed in _microbatches(backbone, requests, capacity):
            batch = pack_samples(placed, row_tile, backbone.device)
            self._running.append((owners, backbone.look(batch, row_tile)))
        self._ended = DeviceEvent(backbone.device)

    def outcome(self) -> EvaluationOutcome:
        """Waits for them. The means are summed sample by sample in the given order; NaN if nothing is supervised."""
        tallies = [Tally() for _ in range(self._num_requests)]
        for owners, running in self._running:
            for owner, score in zip(owners, running.scores(), strict=True):
                tallies[owner].add(score)
        seconds = self._ended.seconds_since(self._begun)
        return EvaluationOutcome([tally.means() for tally in tallies], seconds, self._ended.wait())


def mean_scores(backbone: Backbone, requests: Sequence[ScoreRequest], capacity: int, row_tile: int) -> list[MeanScores]:
    """Per request its means."""
    return list(EvaluationInFlight(backbone, requests, capacity, row_tile).outcome().means)


def _microbatches(
    backbone: Backbone, requests: Sequence[ScoreRequest], capacity: int
) -> Iterator[tuple[list[int], list[Placed]]]:
    """Groups of samples that share a path and fit a microbatch, in the order of the requests; and whose each is."""
    owners_of = np.repeat(np.arange(len(requests)), [data.num_groups for _, data in requests])
    groups = np.concatenate([np.arange(data.num_groups) for _, data in requests])
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
            placed += [
                Placed(m.sample, None if m.is_bare else slot, objective=data.judge, head=data.head) for m in members
            ]
            owners += [int(owners_of[end])] * len(members)
            end += 1
        yield owners, placed
        start = end
