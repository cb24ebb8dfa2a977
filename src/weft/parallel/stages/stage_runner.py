"""What a stage of a pipeline runs a part of a model with: forward and backward apart, several microbatches in flight.

One tensor enters and one leaves, and their gradients go the other way. On the reference path autograd's graph ends at
the borders of the part. On the fused path a microbatch has buffers of its own until its backward, and free ones serve
the next microbatch; every sample there counts as adapted, even without modules in this part, so the kernels are those
that the whole model would take.

Shape suffixes: T rows, N supervised rows, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from weft.kernels.device_event import DeviceEvent
from weft.model.backbone import Backbone
from weft.model.fused.graphs import InFlightBuffers
from weft.model.fused.inputs import InputShape
from weft.model.fused.path import FusedPath
from weft.model.model_part import ModelPart
from weft.model.packed import PackedBatch
from weft.model.path import PendingBackward, PendingScores


class StageRunner(Protocol):
    """The microbatches in progress in one part of a model. Results belong to the caller: no later microbatch changes
    them. Only hidden states that leave the last stage are not returned."""

    def forward(
        self, microbatch: int, batch: PackedBatch, row_tile: int | None, entering_TD: torch.Tensor | None
    ) -> torch.Tensor:
        """Runs a microbatch forward and keeps it until its backward; the output goes to the next stage, if any."""

    def backward(
        self, microbatch: int, gradient_TD: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, PendingScores | None]:
        """Runs it backward: the gradient of its input, if it is needed, and the last stage's scores. `gradient_TD`:
        gradient of the output; the last stage has its own."""

    def look(
        self, batch: PackedBatch, row_tile: int | None, entering_TD: torch.Tensor | None
    ) -> tuple[torch.Tensor, PendingScores | None]: ...

    def read(self, batch: PackedBatch, row_tile: int | None, entering_TD: torch.Tensor | None) -> torch.Tensor:
        """Runs a microbatch forward without scores; returns the output, or the last stage's hidden states of supervised
        rows (N, D)."""

    def forget(self) -> None:
        """Drops all microbatches that wait for their backward."""


@dataclass(frozen=True, eq=False)
class _InFlight:
    buffers: InFlightBuffers
    begun: DeviceEvent
    grad_TD: torch.Tensor | None = None
    scores: Callable[[DeviceEvent], PendingScores] | None = None


class FusedStageRunner:
    def __init__(self, path: FusedPath, part: ModelPart, device: torch.device) -> None:
        self.part = part
        self._path, self._device = path, device
        self._free: list[InFlightBuffers] = []
        self._in_flight: dict[int, _InFlight] = {}

    def forward(
        self, microbatch: int, batch: PackedBatch, row_tile: int | None, entering_TD: torch.Tensor | None
    ) -> torch.Tensor:
        begun = DeviceEvent(self._device)
        buffers = self._free_buffers()
        self._path.follow(batch.segment_slots)
        left_TD = buffers.forward(batch, self._shape(batch), row_tile, entering_TD, needs_grad=True)
        if not self.part.is_last:
            self._in_flight[microbatch] = _InFlight(buffers, begun)
            return self._own(left_TD, batch)
        grad_TD = buffers.zero_gradient()
        scores = self._path.learn(left_TD, batch, grad_TD)
        self._in_flight[microbatch] = _InFlight(buffers, begun, grad_TD, scores)
        return left_TD

    def backward(
        self, microbatch: int, gradient_TD: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, PendingScores | None]:
        kept = self._in_flight.pop(microbatch)
        grad_TD = gradient_TD if kept.grad_TD is None else kept.grad_TD
        assert grad_TD is not None, "the next stage sends it"
        back_TD = kept.buffers.backward(grad_TD)
        if back_TD is not None:
            back_TD = back_TD.clone()
        self._free.append(kept.buffers)
        return back_TD, None if kept.scores is None else kept.scores(kept.begun)

    def look(
        self, batch: PackedBatch, row_tile: int | None, entering_TD: torch.Tensor | None
    ) -> tuple[torch.Tensor, PendingScores | None]:
        begun = DeviceEvent(self._device)
        left_TD = self._look(batch, row_tile, entering_TD)
        if self.part.is_last:
            return left_TD, self._path.score(left_TD, batch, begun)
        return self._own(left_TD, batch), None

    def read(self, batch: PackedBatch, row_tile: int | None, entering_TD: torch.Tensor | None) -> torch.Tensor:
        left_TD = self._look(batch, row_tile, entering_TD)
        return left_TD[batch.supervised_N] if self.part.is_last else self._own(left_TD, batch)

    def _look(self, batch: PackedBatch, row_tile: int | None, entering_TD: torch.Tensor | None) -> torch.Tensor:
        """Returns the output, which the next microbatch in the same buffers may overwrite."""
        buffers = self._free_buffers()
        self._path.follow(batch.segment_slots)
        left_TD = buffers.forward(batch, self._shape(batch), row_tile, entering_TD, needs_grad=False)
        self._free.append(buffers)
        return left_TD

    def forget(self) -> None:
        for kept in self._in_flight.values():
            kept.buffers.clear()
            self._free.append(kept.buffers)
        self._in_flight.clear()

    def _free_buffers(self) -> InFlightBuffers:
        return self._free.pop() if self._free else self._path.new_buffers()

    def _shape(self, batch: PackedBatch) -> InputShape:
        return replace(self._path.shape_of(batch), is_adapted=True)

    @staticmethod
    def _own(left_TD: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        """Returns a copy that later microbatches do not overwrite, without a graph's surplus rows."""
        return left_TD[: batch.num_rows].clone()


@dataclass(frozen=True, eq=False)
class _InAutograd:
    entered_TD: torch.Tensor | None
    """Input of the part; None on the first stage, since the gradient of embeddings is not needed."""
    left_TD: torch.Tensor
    begun: DeviceEvent
    learnt: PendingBackward | None = None
    """Remaining part of the backward, on the last stage, whose loss is computed with the forward."""


class ReferenceStageRunner:
    def __init__(self, backbone: Backbone) -> None:
        assert backbone.part is not None, "a whole model has no borders"
        self.part = backbone.part
        self._path = backbone.reference
        self._device = backbone.device
        self._in_flight: dict[int, _InAutograd] = {}

    def forward(
        self, microbatch: int, batch: PackedBatch, row_tile: int | None, entering_TD: torch.Tensor | None
    ) -> torch.Tensor:
        begun = DeviceEvent(self._device)
        entered_TD = None if entering_TD is None else entering_TD.requires_grad_()
        left_TD = self._path.hidden(batch, row_tile, entering_TD=entered_TD)
        learnt = self._path.learn(left_TD.detach(), batch) if self.part.is_last else None
        self._in_flight[microbatch] = _InAutograd(entered_TD, left_TD, begun, learnt)
        return left_TD.detach()

    def backward(
        self, microbatch: int, gradient_TD: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, PendingScores | None]:
        kept = self._in_flight.pop(microbatch)
        self._path.go_back(kept.left_TD, gradient_TD if kept.learnt is None else kept.learnt.grad_TD)
        scores = None if kept.learnt is None else kept.learnt.scores(kept.begun)
        return None if kept.entered_TD is None else kept.entered_TD.grad, scores

    @torch.no_grad()
    def look(
        self, batch: PackedBatch, row_tile: int | None, entering_TD: torch.Tensor | None
    ) -> tuple[torch.Tensor, PendingScores | None]:
        begun = DeviceEvent(self._device)
        left_TD = self._path.hidden(batch, row_tile, entering_TD=entering_TD)
        return left_TD, self._path.score(left_TD, batch, begun) if self.part.is_last else None

    @torch.no_grad()
    def read(self, batch: PackedBatch, row_tile: int | None, entering_TD: torch.Tensor | None) -> torch.Tensor:
        left_TD = self._path.hidden(batch, row_tile, entering_TD=entering_TD)
        return left_TD[batch.supervised_N] if self.part.is_last else left_TD

    def forget(self) -> None:
        self._in_flight.clear()


def stage_runner(backbone: Backbone) -> StageRunner:
    assert backbone.part is not None, "a whole model has no borders"
    if isinstance(backbone.path, FusedPath):
        return FusedStageRunner(backbone.path, backbone.part, backbone.device)
    return ReferenceStageRunner(backbone)
