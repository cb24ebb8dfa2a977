"""The whole idea: one microbatch of many jobs through one backbone, then each job steps by itself.

for every segment:   its sample, its slot, its weight 1 / (what its job's global batch is divided by)
references         → values that objectives compare with, of new samples
one packed buffer →  the backbone runs once for all; each slot adds its A and B on its own rows
per-segment scores → each to its own job;   gradients → each into its own adapter
steps              → each job alone is checked, clipped, stepped
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from weft.engine.execute.optimizers.optimizer import step_together
from weft.engine.execute.protocol import MicrobatchOutcome, MicrobatchWork, NewJob, StepOrder
from weft.engine.execute.references import JobReference, ReferenceRequest, requested_rows, run_references
from weft.engine.execute.weights import JobWeights
from weft.kernels.adamw import Updated
from weft.kernels.device_event import DeviceEvent
from weft.kernels.dropout import mix
from weft.model.backbone import Backbone
from weft.model.packed import PackedBatch, SlotSample, pack_samples
from weft.model.path import PendingScores
from weft.plan.types import Segment


@dataclass(frozen=True)
class ExecutedJob:
    given: NewJob
    weights: JobWeights
    reference: JobReference | None = None

    @property
    def request(self) -> ReferenceRequest | None:
        return (
            None if self.reference is None else ReferenceRequest(self.reference, self.weights.slot, self.given.batches)
        )

    def sample_of(self, segment: Segment, row_tile: int) -> SlotSample:
        return packed_sample(self.given, self.weights.slot, segment, self.reference, row_tile)


def packed_sample(
    job: NewJob, slot: int | None, segment: Segment, reference: JobReference | None, row_tile: int
) -> SlotSample:
    """A segment's sample with all that the backbone needs; changes nothing."""
    batches, seed, step = job.batches, job.spec.seed, segment.step
    batch = batches[step]
    member = batch.members[segment.index]
    return SlotSample(
        sample=member.sample,
        slot=slot,
        weight=1.0 / batch.divisor,
        dropout_key=mix(seed, step, segment.index),
        step_key=mix(seed, step),
        is_separate=job.spec.gradient_sum == "any_order",
        objective=batches.data.likelihood_objective,
        head=batches.data.head,
        reference=None if reference is None else reference.rows(member.own, slot, row_tile),
        distillation=batches.data.distillation,
    )


Jobs = Mapping[str, ExecutedJob]


def pack_microbatch(backbone: Backbone, jobs: Jobs, work: MicrobatchWork) -> PackedBatch:
    """One buffer with every segment's sample. Changes no job, so it may be made early and dropped."""
    samples = [jobs[segment.job].sample_of(segment, work.row_tile) for segment in work.microbatch.segments]
    return pack_samples(samples, work.row_tile, backbone.device)


class MicrobatchInFlight:
    """A started microbatch; the device adds every segment's gradients to those of its own job."""

    def __init__(self, backbone: Backbone, jobs: Jobs, work: MicrobatchWork, batch: PackedBatch) -> None:
        self._owners = [segment.job for segment in work.microbatch.segments]
        self._begun = DeviceEvent(backbone.device)
        requests = {name: jobs[name].request for name in work.microbatch.job_tokens}
        rows = requested_rows(work.microbatch, batch, work.row_tile, requests)
        self._num_reference_rows = run_references(backbone, rows, work.row_tile, batch.num_rows)
        self._num_rows = batch.num_rows + self._num_reference_rows
        self._running: PendingScores = backbone.launch(batch, work.row_tile)

    def outcome(self) -> MicrobatchOutcome:
        running, ended_s = self._running, self._running.wait()
        seconds = running.seconds(self._begun)
        return MicrobatchOutcome(running.scores(), self._num_rows, seconds, ended_s, self._num_reference_rows)

    def take_steps(self, jobs: Jobs, orders: Sequence[StepOrder]) -> Callable[[], list[Updated]]:
        """Starts the steps of jobs whose global batch ends here, without waiting for the microbatch."""
        indices = {order.job: index for index, order in enumerate(orders)}
        owners = [indices.get(owner, -1) for owner in self._owners]
        return take_steps(jobs, orders, self._running.finite(owners, len(orders)))


def take_steps(
    jobs: Jobs, orders: Sequence[StepOrder], finite_J: torch.Tensor | None = None
) -> Callable[[], list[Updated]]:
    """Starts to clip and apply the gradients of complete global batches, each job's as if alone; non-finite ones are
    skipped. `finite_J`: per job, a finite flag of losses still on the device. Returns a function that waits."""
    optimizers = [jobs[order.job].weights.optimizer for order in orders]
    for optimizer, order in zip(optimizers, orders, strict=True):
        optimizer.set_rate(order.learning_rate)
        optimizer.adapter.complete_gradients()
    wait = step_together(optimizers, [order.is_finite for order in orders], finite_J)
    stepped = [jobs[order.job].weights for order in orders]

    def results() -> list[Updated]:
        found = wait()
        for weights, updated in zip(stepped, found, strict=True):
            weights.after_step(updated)
        return found

    return results
