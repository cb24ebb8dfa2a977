"""Runs microbatches through one part of a model on the reference path, forward and backward apart.

Autograd's graph ends at the borders of the part: one tensor enters and one leaves, and their gradients go the other
way. Any number of microbatches can be between forward and backward. Shape suffixes: T rows, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.kernels.device_event import DeviceEvent
from weft.model.backbone import Backbone
from weft.model.packed import PackedBatch
from weft.model.reference import PendingBackward
from weft.model.scores import PendingScores


@dataclass(frozen=True, eq=False)
class _InFlight:
    """A microbatch between its forward and its backward."""

    entered_TD: torch.Tensor | None
    """None on the first stage: nobody waits for the gradient of embeddings."""
    left_TD: torch.Tensor
    begun: DeviceEvent
    learnt: PendingBackward | None = None
    """Where this is the last stage."""


class ReferenceStageRunner:
    """The microbatches that are on their way through one part of a model."""

    def __init__(self, backbone: Backbone) -> None:
        assert backbone.part is not None, "a whole model has no borders"
        self.part = backbone.part
        self._path = backbone.reference
        self._device = backbone.device
        self._in_flight: dict[int, _InFlight] = {}

    def forward(
        self, microbatch: int, batch: PackedBatch, row_tile: int | None, entering_TD: torch.Tensor | None
    ) -> torch.Tensor:
        """Runs a microbatch forward and keeps it until its backward; what leaves goes to the next stage, if any."""
        begun = DeviceEvent(self._device)
        entered_TD = None if entering_TD is None else entering_TD.requires_grad_()
        left_TD = self._path.hidden(batch, row_tile, entering_TD=entered_TD)
        learnt = self._path.learn(left_TD.detach(), batch) if self.part.is_last else None
        self._in_flight[microbatch] = _InFlight(entered_TD, left_TD, begun, learnt)
        return left_TD.detach()

    def backward(
        self, microbatch: int, gradient_TD: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, PendingScores | None]:
        """Runs it backward: the gradient of what entered, if anybody waits for it, and the last stage's scores.

        `gradient_TD`: of what left; the last stage has its own.
        """
        kept = self._in_flight.pop(microbatch)
        self._path.go_back(kept.left_TD, gradient_TD if kept.learnt is None else kept.learnt.grad_TD)
        scores = None if kept.learnt is None else kept.learnt.scores(kept.begun)
        return None if kept.entered_TD is None else kept.entered_TD.grad, scores

    @torch.no_grad()
    def look(
        self, batch: PackedBatch, row_tile: int | None, entering_TD: torch.Tensor | None
    ) -> tuple[torch.Tensor, PendingScores | None]:
        """Runs a microbatch forward only: what leaves, and the last stage's scores."""
        begun = DeviceEvent(self._device)
        left_TD = self._path.hidden(batch, row_tile, entering_TD=entering_TD)
        return left_TD, self._path.judge(left_TD, batch, begun) if self.part.is_last else None

    @torch.no_grad()
    def read(self, batch: PackedBatch, row_tile: int | None, entering_TD: torch.Tensor | None) -> torch.Tensor:
        """The same without scores: what leaves, or the last stage's hidden states of supervised rows (N, D)."""
        left_TD = self._path.hidden(batch, row_tile, entering_TD=entering_TD)
        return left_TD[batch.supervised_N] if self.part.is_last else left_TD

    def forget(self) -> None:
        """Lets go of all microbatches that wait for their backward."""
        self._in_flight.clear()
