"""Runs microbatches through the fused step, with the adapters on its slots; stages run parts of one by `stage.py`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch

from weft.adapters.adapter import Adapter
from weft.adapters.method import Keeps
from weft.adapters.parts import HeadWeights
from weft.kernels.device import is_gpu
from weft.kernels.device_event import DeviceEvent, sent
from weft.kernels.lora.product import fits
from weft.model.fused.decode import FusedDecoder
from weft.model.fused.graphs import InFlightBuffers
from weft.model.fused.inputs import InputShape, input_shape
from weft.model.fused.model import FusedModel, tile_for
from weft.model.loss import BlockedLoss, DistillationPass, Head, run_distillation
from weft.model.objective_loss import HeadPass, run_heads, run_loss
from weft.model.packed import PackedBatch
from weft.model.packing.attention import needs_bounds
from weft.model.path import Memory, PendingScores
from weft.model.shards import LayerRing
from weft.plan.cost.memory import MemoryModel, rank_class
from weft.plan.cost.shape import CPU_ROW_TILE, gpu_row_tile

DECODING_CAPACITY = 8192
"""Rows whose tile new sequences are read in, where products need one."""


class FusedPath:
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
        """`modules`: the table's modules by path; `heads`: those of jobs, by slot. `lane`: two paths that run on one
        GPU at the same time have different lanes."""
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
        self._buffers: list[InFlightBuffers] = []
        self._only = self.new_buffers()
        self._loss = BlockedLoss(head)
        self._decoder: FusedDecoder | None = None

    @property
    def model(self) -> FusedModel:
        return self._model

    def gather_by(self, ring: LayerRing) -> None:
        # Graphs would read where the weights have been.
        self.forget()
        self._model = replace(self._model, ring=ring)
        self._buffers.clear()
        self._only = self.new_buffers()

    @property
    def copy_bytes(self) -> int:
        return self._model.dtype.itemsize

    def take_slot(self, adapter: Adapter) -> int:
        copy = adapter.method.kernel_copy(adapter, self._model.dtype)
        entries = {self._modules[path]: entry for path, entry in copy.entries.items()}
        slot = self.table.put(entries, copy.others.numbered(self._modules))
        adapter.kernel_copy, self._adapters[slot] = copy, adapter
        return slot

    def free_slot(self, slot: int) -> None:
        self.table.remove(slot)
        self._adapters.pop(slot).kernel_copy = None

    @property
    def decoder(self) -> FusedDecoder | None:
        """What decodes on this path; None for a model that is divided, or a GPU whose attention has no pages."""
        model = self._model
        is_whole = model.is_first and model.is_last and model.ring is None and model.devices is None
        if not is_whole or needs_bounds(self._device):
            return None
        if self._decoder is None:
            like = torch.empty(0, model.hidden, dtype=model.dtype, device=self._device)
            layer = model.layers[0]
            sites = (product.site for product in (layer.qkv, layer.out, layer.gate_up, layer.down))
            has_kernels = all(fits(site, like, backward=False) for site in sites)
            tile = self.row_tile(DECODING_CAPACITY)
            self._decoder = FusedDecoder(model, self.table, self.follow, tile, has_kernels=has_kernels)
        return self._decoder

    def launch(self, batch: PackedBatch, row_tile: int | None, *, through: bool = False) -> PendingScores:
        begun = DeviceEvent(self._device)
        shape = self.shape_of(batch)
        if not (through or shape.is_adapted):
            return self.score(self._only.forward(batch, shape, row_tile, needs_grad=False), batch, begun)
        self.follow(batch.segment_slots)
        hidden_TD = self._only.forward(batch, shape, row_tile, needs_grad=True)
        grad_TD = self._only.zero_gradient()
        scores = self.learn(hidden_TD, batch, grad_TD)
        self._only.backward(grad_TD)
        return scores(begun)

    def learn(
        self, hidden_TD: torch.Tensor, batch: PackedBatch, grad_TD: torch.Tensor
    ) -> Callable[[DeviceEvent], PendingScores]:
        """The losses of the last hidden states; writes their gradient into zeros. The returned function is called once
        all other work has been launched, with the moment when the microbatch began."""
        rows_N, targets_N, weights_N = self._supervised(batch)
        found = run_loss(self._loss, hidden_TD[rows_N], targets_N, weights_N, batch.scored_groups)
        assert found.grad_ND is not None
        grad_TD.index_copy_(0, rows_N, found.grad_ND)
        headed, taught = self._other_rows(hidden_TD, batch, grad_TD)
        return lambda begun: PendingScores(found, batch, begun, headed, taught)

    def look(self, batch: PackedBatch, row_tile: int | None) -> PendingScores:
        begun = DeviceEvent(self._device)
        return self.score(self._hidden(batch, row_tile), batch, begun)

    def score(self, hidden_TD: torch.Tensor, batch: PackedBatch, begun: DeviceEvent) -> PendingScores:
        rows_N, targets_N, _ = self._supervised(batch)
        found = run_loss(self._loss, hidden_TD[rows_N], targets_N, None, batch.scored_groups)
        return PendingScores(found, batch, begun, *self._other_rows(hidden_TD, batch))

    def read(self, batch: PackedBatch, row_tile: int | None) -> torch.Tensor:
        return self._hidden(batch, row_tile)[self._supervised(batch)[0]]

    def _other_rows(
        self, hidden_TD: torch.Tensor, batch: PackedBatch, grad_TD: torch.Tensor | None = None
    ) -> tuple[list[HeadPass], list[DistillationPass]]:
        headed = run_heads(hidden_TD, batch.heads, self._heads, grad_TD)
        return headed, run_distillation(self._loss.head, hidden_TD, batch.taught, grad_TD)

    def _hidden(self, batch: PackedBatch, row_tile: int | None) -> torch.Tensor:
        """The last hidden states of a microbatch that runs forward only; the next one may overwrite them. With adapters
        attached it uses the kernels of their microbatches even without rows of theirs: reference values must not depend
        on which graphs exist, nor wait for another capture."""
        shape = self.shape_of(batch)
        shape = replace(shape, is_adapted=shape.is_adapted or bool(self._adapters))
        self.follow(batch.segment_slots)
        return self._only.forward(batch, shape, row_tile, needs_grad=False)

    def shape_of(self, batch: PackedBatch) -> InputShape:
        return input_shape(batch, with_longest=needs_bounds(self._device))

    def loss(self, batch: PackedBatch) -> BlockedLoss:
        return self._loss

    def row_tile(self, capacity: int) -> int:
        """Rows per block of every frozen product: whole tiles fill a capacity."""
        return gpu_row_tile(capacity, self._model.hidden) if is_gpu(self._device) else CPU_ROW_TILE

    def activation_bytes(self, capacity: int, widest_rank: int, keeps: Collection[Keeps] = ()) -> int:
        """Upper bound of a microbatch's memory between forward and backward, by the memory model."""
        model, tile = self._memory_model, self.row_tile(capacity)
        rows = -(-capacity // tile) * tile
        kept = model.kept_bytes(rows, widest_rank) - (model.offloaded_bytes(rows) if self.memory.offload else 0)
        kept += sum(self._width(kind, widest_rank) for kind in keeps) * rows * self.copy_bytes
        loss = model.loss_bytes() if self._model.is_last else 0
        return kept + model.workspace_bytes(rows, widest_rank) + loss

    def _width(self, kind: Keeps, widest_rank: int) -> int:
        """Upper bound of the numbers per row that are kept for a method besides S."""
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
        for buffers in self._buffers:
            buffers.forget()
        if self._decoder is not None:
            self._decoder.forget()

    def new_buffers(self) -> InFlightBuffers:
        self._buffers.append(InFlightBuffers(self._model, self.table, self.memory, self._tile, self._lane))
        return self._buffers[-1]

    @property
    def captured_s(self) -> float:
        return sum(buffers.captured_s for buffers in self._buffers)

    def _tile(self, num_rows: int, row_tile: int | None) -> int | None:
        key = (num_rows, row_tile)
        if key not in self._tiles:
            self._tiles[key] = tile_for(self._model, num_rows, row_tile)
        return self._tiles[key]

    def follow(self, slots: Iterable[int | None]) -> None:
        """Updates the kernels' copies of the adapters on some slots."""
        for slot in dict.fromkeys(slots):
            if slot is not None:
                copy = self._adapters[slot].kernel_copy
                assert copy is not None
                copy.follow()

    def _supervised(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows of the loss, their targets and weights, in one transfer."""
        numbers = np.stack([batch.supervised, batch.targets, batch.weights.view(np.int32)]).astype(np.int32)
        found = sent(torch.from_numpy(numbers), self._device)
        return found[0].long(), found[1].long(), found[2].view(torch.float32)
