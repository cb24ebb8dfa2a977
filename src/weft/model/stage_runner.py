"""What a stage of a pipeline runs a part of a model with: forward and backward apart, several microbatches in flight.

One tensor enters and one leaves, and their gradients go the other way. Both paths have one: the reference path cuts
autograd's graph at the borders, the fused path its list of layers.
"""

from __future__ import annotations

from typing import Protocol

import torch

from weft.model.backbone import Backbone
from weft.model.fused.path import FusedPath
from weft.model.fused.stage import FusedStageRunner
from weft.model.packed import PackedBatch
from weft.model.reference_stage import ReferenceStageRunner
from weft.model.scores import PendingScores


class StageRunner(Protocol):
    """The microbatches that are on their way through one part of a model.

    What is returned is the caller's: no later microbatch changes it. Only hidden states that leave the last stage are
    nobody's.
    """

    def forward(
        self, microbatch: int, batch: PackedBatch, row_tile: int | None, entering_TD: torch.Tensor | None
    ) -> torch.Tensor:
        """Runs a microbatch forward and keeps it until its backward; what leaves goes to the next stage, if any."""
        ...

    def backward(
        self, microbatch: int, gradient_TD: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, PendingScores | None]:
        """Runs it backward: the gradient of what entered, if anybody waits for it, and the last stage's scores.

        `gradient_TD`: of what left; the last stage has its own.
        """
        ...

    def look(
        self, batch: PackedBatch, row_tile: int | None, entering_TD: torch.Tensor | None
    ) -> tuple[torch.Tensor, PendingScores | None]:
        """Runs a microbatch forward only: what leaves, and the last stage's scores."""
        ...

    def read(self, batch: PackedBatch, row_tile: int | None, entering_TD: torch.Tensor | None) -> torch.Tensor:
        """The same without scores: what leaves, or the last stage's hidden states of supervised rows (N, D)."""
        ...

    def forget(self) -> None:
        """Lets go of all microbatches that wait for their backward."""
        ...


def stage_runner(backbone: Backbone) -> StageRunner:
    """The one of the path that the backbone takes."""
    assert backbone.part is not None, "a whole model has no borders"
    if isinstance(backbone.path, FusedPath):
        return FusedStageRunner(backbone.path, backbone.part, backbone.device)
    return ReferenceStageRunner(backbone)
