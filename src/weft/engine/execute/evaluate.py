"""Mean loss and token accuracy on evaluation samples: one pass of the frozen model serves all jobs that are due."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from weft.data.dataset import Dataset
from weft.engine.execute.protocol import EvaluationOutcome
from weft.engine.execute.references import Asked, JobReference, ReferenceCache, hear_references
from weft.kernels.device_event import DeviceEvent
from weft.model.backbone import Backbone
from weft.model.packed import PackedBatch, PlacedSample, pack_samples
from weft.model.scores import PendingScores
from weft.objectives.metrics import MeanScores, MetricTotals


class ScoreRequest(NamedTuple):
    """What is evaluated on what."""

    slot: int | None
    """None: the bare backbone."""
    data: Dataset
    reference: JobReference | None = None
    """What the data's objective compares with, where it does; None: the bare backbone."""


class EvaluationInFlight:
    """Evaluations that have been started behind all that the device had to do; nobody has waited for them."""

    def __init__(self, backbone: Backbone, requests: Sequence[ScoreRequest], capacity: int, row_tile: int) -> None:
        self._num_requests = len(requests)
        self._begun = DeviceEvent(backbone.device)
        self._running: list[tuple[list[int], PendingScores]] = []
        """Each microbatch with the request of each of its samples."""
        known = ReferenceCache(backbone)
        requests = [
            request._replace(reference=JobReference(known, request.data))
            if request.data.reads_reference and request.reference is None
            else request
            for request in requests
        ]
        for owners, placed in evaluation_microbatches(backbone, requests, capacity, row_tile):
            batch = pack_samples(placed, row_tile, backbone.device)
            hear_references(backbone, evaluation_rows(requests, owners, batch), row_tile, capacity)
            self._running.append((owners, backbone.look(batch, row_tile)))
        self._ended = DeviceEvent(backbone.device)

    def outcome(self) -> EvaluationOutcome:
        """Waits for them. The means are summed sample by sample in the given order; NaN if nothing is supervised."""
        means = mean_of(self._running, self._num_requests)
        return EvaluationOutcome(means, self._ended.seconds_since(self._begun), self._ended.wait())


def evaluation_rows(requests: Sequence[ScoreRequest], owners: Sequence[int], batch: PackedBatch) -> list[Asked]:
    """What a microbatch has to know of references; given: the request of each sample."""
    return [
        Asked(reference, slot, rows)
        for (slot, _, reference), rows in zip((requests[o] for o in owners), batch.references, strict=True)
        if reference is not None and rows is not None
    ]


def mean_of(running: Sequence[tuple[list[int], PendingScores]], num_requests: int) -> list[MeanScores]:
    """Per request its means, summed sample by sample; given: microbatches with the request of each sample."""
    tallies = [MetricTotals() for _ in range(num_requests)]
    for owners, pending in running:
        for owner, score in zip(owners, pending.scores(), strict=True):
            tallies[owner].add(score)
    return [tally.means() for tally in tallies]


def mean_scores(backbone: Backbone, requests: Sequence[ScoreRequest], capacity: int, row_tile: int) -> list[MeanScores]:
    """Per request its means."""
    return list(EvaluationInFlight(backbone, requests, capacity, row_tile).outcome().means)


def evaluation_microbatches(
    backbone: Backbone, requests: Sequence[ScoreRequest], capacity: int, row_tile: int
) -> Iterator[tuple[list[int], list[PlacedSample]]]:
    """Groups of samples that share a path and fit a microbatch, in the order of the requests; and whose each is."""
    sizes = [request.data.num_groups for request in requests]
    owners_of = np.repeat(np.arange(len(requests)), sizes)
    groups = np.concatenate([np.arange(size) for size in sizes])
    start = 0
    while start < len(groups):
        end, tokens, placed, owners = start, 0, [], []
        path = backbone.path_of(requests[owners_of[start]].slot)
        while end < len(groups):
            request = requests[owners_of[end]]
            tokens += sum(request.data.member_lengths(int(groups[end])))
            if end > start and (tokens > capacity or backbone.path_of(request.slot) is not path):
                break
            of_group = _placed(request, int(groups[end]), row_tile)
            placed += of_group
            owners += [int(owners_of[end])] * len(of_group)
            end += 1
        yield owners, placed
        start = end


def _placed(request: ScoreRequest, group: int, row_tile: int) -> list[PlacedSample]:
    """One group of a request."""
    slot, data, reference = request
    return [
        PlacedSample(
            member.sample,
            slot,
            objective=data.likelihood_objective,
            head=data.head,
            distillation=data.distillation,
            reference=None if reference is None else reference.rows(member.own, slot, row_tile),
        )
        for member in data.members(group)
    ]
