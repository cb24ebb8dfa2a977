"""The two ways through a frozen model, as one protocol: the reference path and the fused path.

A path runs packed microbatches with the adapters on its slots. `Backbone` chooses one when kernels are chosen; nobody
else asks which it is.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch

from weft.adapters.adapter import Adapter
from weft.adapters.method import Keeps
from weft.model.judge import MicrobatchLoss
from weft.model.packed import PackedBatch
from weft.model.scores import PendingScores

Recompute = Literal["none", "mlp", "full"]


@dataclass(frozen=True)
class Memory:
    """Trades time for memory; no choice changes a result."""

    recompute: Recompute = "none"
    """What is made again on the way back: cheap things only, also the widest product of a layer, or all of a layer."""
    offload: bool = False
    """Keep the rest in the machine's own memory instead of the GPU's."""


class Path(Protocol):
    """Runs microbatches forward, or forward and back."""

    name: ClassVar[str]
    """What a run records: results of two paths differ in their last bits."""

    @property
    def captured_s(self) -> float:
        """Seconds spent on capturing graphs, so far."""
        ...

    @property
    def memory(self) -> Memory:
        """What the path keeps between forward and backward, and where."""
        ...

    @property
    def copy_bytes(self) -> int:
        """Bytes per trainable parameter that a slot takes beside the adapter's own weights."""
        ...

    def take_slot(self, adapter: Adapter) -> int:
        """Gives an adapter a free slot and returns the slot's number."""
        ...

    def free_slot(self, slot: int) -> None:
        """Makes a slot free again."""
        ...

    def launch(self, batch: PackedBatch, row_tile: int | None, *, through: bool = False) -> PendingScores:
        """Starts a microbatch forward and back, which adds to the gradients of every adapter that takes part.

        Without adapters there is nothing to go back for; `through` goes all the same, to measure what it costs.
        """
        ...

    def look(self, batch: PackedBatch, row_tile: int | None) -> PendingScores:
        """Starts a microbatch forward only."""
        ...

    def loss(self, batch: PackedBatch) -> MicrobatchLoss:
        """What makes losses of the hidden states of a microbatch's supervised rows."""
        ...

    def read(self, batch: PackedBatch, row_tile: int | None) -> torch.Tensor:
        """Starts a microbatch forward only: the last hidden states of its supervised rows (N, D)."""
        ...

    def row_tile(self, capacity: int) -> int:
        """Rows that every frozen product is computed in: a fact of the device, never of the batch's contents."""
        ...

    def activation_bytes(self, capacity: int, widest_rank: int, keeps: Collection[Keeps] = ()) -> int:
        """What a microbatch may hold between forward and backward; `keeps`: of methods that take part."""
        ...

    def forget(self) -> None:
        """Gives back what the path keeps from one microbatch to the next."""
        ...
