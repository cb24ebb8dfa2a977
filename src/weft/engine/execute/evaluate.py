"""Mean loss and token accuracy on evaluation samples: one pass of the frozen model serves all jobs that are due."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import numpy as np

from weft.data.dataset import Dataset
from weft.engine.execute.protocol import EvaluatedPart, EvaluationOutcome, NewJob
from weft.engine.execute.references import JobReference, ReferenceCache, RequestedRows, run_references
from weft.kernels.device_event import DeviceEvent
from weft.model.backbone import Backbone
from weft.model.packed import PackedBatch, SlotSample, pack_samples
from weft.model.path import PendingScores
from weft.objectives.objective import MeanScores, MetricTotals


class ScoreRequest(NamedTuple):
    slot: int | None
    data: Dataset
    reference: JobReference | None = None
    """Reference of the data's objective, where it has one; None: the bare backbone."""
    after: EvaluatedPart = EvaluatedPart()
    """Part of the data that earlier slices have evaluated."""


@contextmanager
def evaluated(
    job: NewJob, reference: JobReference | None, slot: AbstractContextManager[int | None]
) -> Iterator[ScoreRequest]:
    """A job's evaluation on a slot, while its reference has one too."""
    assert job.eval_data is not None, "only jobs with evaluation data are evaluated"
    passing = None if reference is None or reference.takes_part else reference
    if passing is not None:
        passing.take_slot()
    try:
        with slot as index:
            yield ScoreRequest(index, job.eval_data, reference)
    finally:
        if passing is not None:
            passing.free_slot()


class EvaluationBatch(NamedTuple):
    """Groups of samples that share a path and fit a microbatch."""

    owners: list[int]
    samples: list[SlotSample]
    num_groups: Counter[int]


RunningBatch = tuple[EvaluationBatch, PendingScores]


class EvaluationInFlight:
    def __init__(
        self,
        backbone: Backbone,
        requests: Sequence[ScoreRequest],
        capacity: int,
        row_tile: int,
        max_microbatches: int | None = None,
    ) -> None:
        self._requests = requests
        self._begun = DeviceEvent(backbone.device)
        self._running: list[RunningBatch] = []
        known = ReferenceCache(backbone)
        requests = [
            request._replace(reference=JobReference(known, request.data))
            if request.data.reads_reference and request.reference is None
            else request
            for request in requests
        ]
        microbatches = evaluation_microbatches(backbone, requests, capacity, row_tile)
        for microbatch in itertools.islice(microbatches, max_microbatches):
            batch = pack_samples(microbatch.samples, row_tile, backbone.device)
            run_references(backbone, evaluation_rows(requests, microbatch.owners, batch), row_tile, capacity)
            self._running.append((microbatch, backbone.look(batch, row_tile)))
        self._ended = DeviceEvent(backbone.device)

    def outcome(self) -> EvaluationOutcome:
        parts = evaluated_parts(self._running, self._requests)
        return EvaluationOutcome(parts, self._ended.seconds_since(self._begun), self._ended.wait())


def evaluation_rows(requests: Sequence[ScoreRequest], owners: Sequence[int], batch: PackedBatch) -> list[RequestedRows]:
    """Reference rows that a microbatch needs; `owners`: the request of each sample."""
    return [
        RequestedRows(reference, slot, rows)
        for (slot, _, reference, _), rows in zip((requests[o] for o in owners), batch.references, strict=True)
        if reference is not None and rows is not None
    ]


def evaluated_parts(running: Sequence[RunningBatch], requests: Sequence[ScoreRequest]) -> list[EvaluatedPart]:
    """The parts of all requests after these microbatches; scores are added up sample by sample."""
    totals = [MetricTotals(request.after.sums) for request in requests]
    num_groups = Counter({index: request.after.num_groups for index, request in enumerate(requests)})
    for microbatch, pending in running:
        num_groups.update(microbatch.num_groups)
        for owner, score in zip(microbatch.owners, pending.scores(), strict=True):
            totals[owner].add(score)
    return [EvaluatedPart(num_groups[index], total.sums) for index, total in enumerate(totals)]


def mean_scores(backbone: Backbone, requests: Sequence[ScoreRequest], capacity: int, row_tile: int) -> list[MeanScores]:
    """Means over all samples of each request; NaN if nothing is supervised."""
    return [part.means for part in EvaluationInFlight(backbone, requests, capacity, row_tile).outcome().parts]


def evaluation_microbatches(
    backbone: Backbone, requests: Sequence[ScoreRequest], capacity: int, row_tile: int
) -> Iterator[EvaluationBatch]:
    """Microbatches of all groups that are left, in request order."""
    left = [range(request.after.num_groups, request.data.num_groups) for request in requests]
    owners_of = np.repeat(np.arange(len(requests)), [len(own) for own in left])
    groups = np.concatenate([np.asarray(own) for own in left])
    start = 0
    while start < len(groups):
        end, tokens, samples, owners = start, 0, [], []
        path = backbone.path_of(requests[owners_of[start]].slot)
        while end < len(groups):
            request = requests[owners_of[end]]
            tokens += sum(request.data.member_lengths(int(groups[end])))
            if end > start and (tokens > capacity or backbone.path_of(request.slot) is not path):
                break
            of_group = _group_samples(request, int(groups[end]), row_tile)
            samples += of_group
            owners += [int(owners_of[end])] * len(of_group)
            end += 1
        yield EvaluationBatch(owners, samples, Counter(owners_of[start:end].tolist()))
        start = end


def _group_samples(request: ScoreRequest, group: int, row_tile: int) -> list[SlotSample]:
    slot, data, reference, _ = request
    return [
        SlotSample(
            member.sample,
            slot,
            objective=data.likelihood_objective,
            head=data.head,
            distillation=data.distillation,
            reference=None if reference is None else reference.rows(member.own, slot, row_tile),
        )
        for member in data.members(group)
    ]
