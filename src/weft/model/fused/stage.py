"""Runs microbatches through one part of a model on the fused path, forward and backward apart.

What the layers keep of a microbatch is in a place of its own until its backward; a place that is free serves the next
one. Every sample of a stage belongs to some adapter, if not to one that has modules here, so the kernels are those that
the whole model would take.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from weft.kernels.device_event import DeviceEvent
from weft.model.fused.inputs import InputShape
from weft.model.fused.path import FusedPath
from weft.model.fused.place import InFlightBuffers
from weft.model.model_part import ModelPart
from weft.model.packed import PackedBatch
from weft.model.scores import PendingScores


@dataclass(frozen=True, eq=False)
class _InFlight:
    """A microbatch between its forward and its backward."""

    place: InFlightBuffers
    begun: DeviceEvent
    grad_TD: torch.Tensor | None = None
    """Of the last hidden states, where this is the last stage."""
    scores: Callable[[DeviceEvent], PendingScores] | None = None


class FusedStageRunner:
    """The microbatches that are on their way through one part of a fused model."""

    def __init__(self, path: FusedPath, part: ModelPart, device: torch.device) -> None:
        self.part = part
        self._path, self._device = path, device
        self._free: list[InFlightBuffers] = []
        self._in_flight: dict[int, _InFlight] = {}

    def forward(
        self, microbatch: int, batch: PackedBatch, row_tile: int | None, entering_TD: torch.Tensor | None
    ) -> torch.Tensor:
        """Runs a microbatch forward and keeps it until its backward; what leaves goes to the next stage, if any."""
        begun = DeviceEvent(self._device)
        place = self._free_buffers()
        self._path.follow(batch)
        left_TD = place.forward(batch, self._shape(batch), row_tile, entering_TD, needs_grad=True)
        if not self.part.is_last:
            self._in_flight[microbatch] = _InFlight(place, begun)
            return self._own(left_TD, batch)
        grad_TD = place.zero_gradient()
        scores = self._path.learn(left_TD, batch, grad_TD)
        self._in_flight[microbatch] = _InFlight(place, begun, grad_TD, scores)
        return left_TD

    def backward(
        self, microbatch: int, gradient_TD: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, PendingScores | None]:
        """Runs it backward: the gradient of what entered, if anybody waits for it, and the last stage's scores.

        `gradient_TD`: of what left; the last stage has its own.
        """
        kept = self._in_flight.pop(microbatch)
        grad_TD = gradient_TD if kept.grad_TD is None else kept.grad_TD
        assert grad_TD is not None, "the next stage sends it"
        back_TD = kept.place.backward(grad_TD)
        if back_TD is not None:
            back_TD = back_TD.clone()
        self._free.append(kept.place)
        return back_TD, None if kept.scores is None else kept.scores(kept.begun)

    def look(
        self, batch: PackedBatch, row_tile: int | None, entering_TD: torch.Tensor | None
    ) -> tuple[torch.Tensor, PendingScores | None]:
        """Runs a microbatch forward only: what leaves, and the last stage's scores."""
        begun = DeviceEvent(self._device)
        left_TD = self._look(batch, row_tile, entering_TD)
        if self.part.is_last:
            return left_TD, self._path.judge(left_TD, batch, begun)
        return self._own(left_TD, batch), None

    def read(self, batch: PackedBatch, row_tile: int | None, entering_TD: torch.Tensor | None) -> torch.Tensor:
        """The same without scores: what leaves, or the last stage's hidden states of supervised rows (N, D)."""
        left_TD = self._look(batch, row_tile, entering_TD)
        return left_TD[batch.supervised_N] if self.part.is_last else self._own(left_TD, batch)

    def _look(self, batch: PackedBatch, row_tile: int | None, entering_TD: torch.Tensor | None) -> torch.Tensor:
        """What leaves; the next microbatch in its place may overwrite it."""
        place = self._free_buffers()
        self._path.follow(batch)
        left_TD = place.forward(batch, self._shape(batch), row_tile, entering_TD, needs_grad=False)
        self._free.append(place)
        return left_TD

    def forget(self) -> None:
        """Lets go of all microbatches that wait for their backward."""
        for kept in self._in_flight.values():
            kept.place.clear()
            self._free.append(kept.place)
        self._in_flight.clear()

    def _free_buffers(self) -> InFlightBuffers:
        return self._free.pop() if self._free else self._path.new_buffers()

    def _shape(self, batch: PackedBatch) -> InputShape:
        return replace(self._path.shape_of(batch), is_adapted=True)

    @staticmethod
    def _own(left_TD: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        """A copy that the next microbatch in its place leaves alone, without rows that only a graph has."""
        return left_TD[: batch.num_rows].clone()
