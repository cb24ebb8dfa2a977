"""Runs microbatches through the fused step, with the adapters on its slots; stages run parts of one by `stage.py`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch

from weft.adapters.adapter import Adapter
from weft.adapters.head import HeadWeights
from weft.adapters.method import Keeps
from weft.kernels.device import is_gpu
from weft.kernels.device_event import DeviceEvent, sent
from weft.kernels.layers.cross_entropy import cross_entropy_rows
from weft.model.distill import DistillationPass, run_distillation
from weft.model.fused.attention import needs_bounds
from weft.model.fused.inputs import InputShape, input_shape
from weft.model.fused.model import FusedModel
from weft.model.fused.place import InFlightBuffers
from weft.model.fused.tiles import tile_for
from weft.model.heads import HeadPass, run_heads
from weft.model.judge import run_loss
from weft.model.loss import BLOCK, BlockedLoss, Head
from weft.model.packed import PackedBatch
from weft.model.path import Memory
from weft.model.scores import PendingScores
from weft.model.shards.ring import LayerRing
from weft.plan.cost.memory import LOSS_ROWS, MemoryModel, rank_class
from weft.plan.cost.rows import CPU_ROW_TILE, gpu_row_tile


class FusedPath:
    """A fused model with its slots."""

    name: ClassVar[str] = "fused"

    def __init__(
        self,
        model: FusedModel,
        modules: Mapping[str, int],
        head: Head,
        memory: Memory,
        memory_model: MemoryModel,
        heads: Mapping[int, HeadWeights],
        lane: int = 0,
    ) -> None:
        """`modules`: the table's modules by path; `heads`: those of jobs, by slot.

        `lane`: of two paths that run on one GPU at the same time, each has its own.
        """
        self._heads = heads
        self.table = model.table()
        self._model = model
        self.memory = memory
        self._memory_model = memory_model
        self._modules = modules
        self._adapters: dict[int, Adapter] = {}
        self._tiles: dict[tuple[int, int | None], int | None] = {}
        self._device = model.device
        self._lane = lane
        self._places: list[InFlightBuffers] = []
        self._only = self.new_buffers()
        """Where microbatches of a model in one piece are."""
        block = LOSS_ROWS if is_gpu(self._device) else BLOCK
        self._loss = BlockedLoss(head, block, cross_entropy_rows)

    @property
    def model(self) -> FusedModel:
        """The model it runs."""
        return self._model

    def gather_by(self, ring: LayerRing) -> None:
        """Lets every layer wait for its frozen weights."""
        # Graphs would read where the weights have been.
        self.forget()
        self._model = replace(self._model, ring=ring)
        self._places.clear()
        self._only = self.new_buffers()

    @property
    def copy_bytes(self) -> int:
        """Bytes per trainable parameter of the copy that kernels read."""
        return self._model.dtype.itemsize

    def take_slot(self, adapter: Adapter) -> int:
        """Puts an adapter on a free slot of the table and returns the slot."""
        copy = adapter.method.kernel_copy(adapter, self._model.dtype)
        entries = {self._modules[path]: entry for path, entry in copy.entries.items()}
        slot = self.table.put(entries, copy.others.numbered(self._modules))
        adapter.kernel_copy, self._adapters[slot] = copy, adapter
        return slot

    def free_slot(self, slot: int) -> None:
        """Frees a slot."""
        self.table.remove(slot)
        self._adapters.pop(slot).kernel_copy = None

    def launch(self, batch: PackedBatch, row_tile: int | None, *, through: bool = False) -> PendingScores:
        """Starts a microbatch forward and back; adds to every attached adapter's gradients.

        Without adapters there is nothing to go back for; `through` goes all the same, to measure what it costs.
        """
        begun = DeviceEvent(self._device)
        shape = self.shape_of(batch)
        if not (through or shape.is_adapted):
            return self.judge(self._only.forward(batch, shape, row_tile, needs_grad=False), batch, begun)
        self.follow(batch)
        hidden_TD = self._only.forward(batch, shape, row_tile, needs_grad=True)
        grad_TD = self._only.zero_gradient()
        scores = self.learn(hidden_TD, batch, grad_TD)
        self._only.backward(grad_TD)
        return scores(begun)

    def learn(
        self, hidden_TD: torch.Tensor, batch: PackedBatch, grad_TD: torch.Tensor
    ) -> Callable[[DeviceEvent], PendingScores]:
        """The losses behind the last hidden states; their gradient is put among zeros.

        What is returned is asked once all else has been asked of the device, and given when the microbatch began.
        """
        rows_N, targets_N, weights_N = self._supervised(batch)
        found = run_loss(self._loss, hidden_TD[rows_N], targets_N, weights_N, batch.scored_groups)
        assert found.grad_ND is not None
        grad_TD.index_copy_(0, rows_N, found.grad_ND)
        headed, taught = self._other_rows(hidden_TD, batch, grad_TD)
        return lambda begun: PendingScores(found, batch, begun, headed, taught)

    def look(self, batch: PackedBatch, row_tile: int | None) -> PendingScores:
        """Starts a microbatch forward only."""
        begun = DeviceEvent(self._device)
        return self.judge(self._hidden(batch, row_tile), batch, begun)

    def judge(self, hidden_TD: torch.Tensor, batch: PackedBatch, begun: DeviceEvent) -> PendingScores:
        """The scores behind the last hidden states of a microbatch that began then; nothing learns from them."""
        rows_N, targets_N, _ = self._supervised(batch)
        found = run_loss(self._loss, hidden_TD[rows_N], targets_N, None, batch.scored_groups)
        return PendingScores(found, batch, begun, *self._other_rows(hidden_TD, batch))

    def read(self, batch: PackedBatch, row_tile: int | None) -> torch.Tensor:
        """Starts a microbatch forward only: the last hidden states of its supervised rows (N, D)."""
        return self._hidden(batch, row_tile)[self._supervised(batch)[0]]

    def _other_rows(
        self, hidden_TD: torch.Tensor, batch: PackedBatch, grad_TD: torch.Tensor | None = None
    ) -> tuple[list[HeadPass], list[DistillationPass]]:
        """The rows whose loss is no cross entropy, and what they add to the gradient."""
        headed = run_heads(hidden_TD, batch.heads, self._heads, grad_TD)
        return headed, run_distillation(self._loss.head, hidden_TD, batch.taught, grad_TD)

    def _hidden(self, batch: PackedBatch, row_tile: int | None) -> torch.Tensor:
        """The last hidden states of a microbatch that goes forward only; the next one may overwrite them.

        While there are adapters it takes the kernels that their microbatches take, also where it has no row of theirs:
        what a reference says must not depend on which graphs there are, nor wait for the capture of another one.
        """
        shape = self.shape_of(batch)
        shape = replace(shape, is_adapted=shape.is_adapted or bool(self._adapters))
        self.follow(batch)
        return self._only.forward(batch, shape, row_tile, needs_grad=False)

    def shape_of(self, batch: PackedBatch) -> InputShape:
        """What the batch needs of a graph."""
        return input_shape(batch, with_longest=needs_bounds(self._device))

    def loss(self, batch: PackedBatch) -> BlockedLoss:
        """What makes losses of the hidden states of a microbatch's supervised rows."""
        return self._loss

    def row_tile(self, capacity: int) -> int:
        """Rows that every frozen product is computed in: whole tiles make up a capacity."""
        return gpu_row_tile(capacity, self._model.hidden) if is_gpu(self._device) else CPU_ROW_TILE

    def activation_bytes(self, capacity: int, widest_rank: int, keeps: Collection[Keeps] = ()) -> int:
        """What a microbatch may hold between forward and backward, by the memory model."""
        model, tile = self._memory_model, self.row_tile(capacity)
        rows = -(-capacity // tile) * tile
        kept = model.kept_bytes(rows, widest_rank) - (model.offloaded_bytes(rows) if self.memory.offload else 0)
        kept += sum(self._width(kind, widest_rank) for kind in keeps) * rows * self.copy_bytes
        loss = model.loss_bytes() if self._model.is_last else 0
        return kept + model.workspace_bytes(rows, widest_rank) + loss

    def _width(self, kind: Keeps, widest_rank: int) -> int:
        """Numbers of a row that are kept for a method besides S, at most."""
        layers, hidden = self._model.layers, self._model.hidden
        if kind == "outputs":
            return len(layers) * (layers[0].qkv.site.num_out + 2 * hidden)
        if kind == "blocks":
            return len(layers) * 2 * (hidden + 2 * rank_class([widest_rank]))
        if kind == "sparse":
            # Of one site at a time; twice, because short samples do not fill their tiles.
            return 2 * max(site.num_in + site.num_out for site in self._model.sites)
        return 0

    def forget(self) -> None:
        """Gives captured graphs and their memory back."""
        for place in self._places:
            place.forget()

    def new_buffers(self) -> InFlightBuffers:
        """Room for one more microbatch between its forward and its backward."""
        self._places.append(InFlightBuffers(self._model, self.table, self.memory, self._tile, self._lane))
        return self._places[-1]

    @property
    def captured_s(self) -> float:
        """Seconds spent on capturing graphs, so far."""
        return sum(place.captured_s for place in self._places)

    def _tile(self, num_rows: int, row_tile: int | None) -> int | None:
        key = (num_rows, row_tile)
        if key not in self._tiles:
            self._tiles[key] = tile_for(self._model, num_rows, row_tile)
        return self._tiles[key]

    def follow(self, batch: PackedBatch) -> None:
        """Brings what kernels read in line with the weights of those who take part."""
        for slot in dict.fromkeys(batch.segment_slots):
            if slot is not None:
                copy = self._adapters[slot].kernel_copy
                assert copy is not None
                copy.follow()

    def _supervised(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows of the loss, their targets and weights, in one transfer."""
        numbers = np.stack([batch.supervised, batch.targets, batch.weights.view(np.int32)]).astype(np.int32)
        found = sent(torch.from_numpy(numbers), self._device)
        return found[0].long(), found[1].long(), found[2].view(torch.float32)
