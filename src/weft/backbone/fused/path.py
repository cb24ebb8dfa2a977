"""Runs microbatches through the fused step: captured graphs on a GPU, line by line elsewhere."""

from __future__ import annotations

import gc
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch

from weft.adapters.adapter import Adapter
from weft.adapters.head import HeadWeights
from weft.adapters.method import Keeps
from weft.backbone.distill import TaughtPass, run_taught
from weft.backbone.fused.attention import needs_bounds
from weft.backbone.fused.captures import CapturedGraphs, GraphKey
from weft.backbone.fused.graph import Captured, capture
from weft.backbone.fused.inputs import Inputs, InputShape, input_array, input_shape, spans_of
from weft.backbone.fused.model import FusedModel
from weft.backbone.fused.step import Passed, run_backward, run_forward
from weft.backbone.fused.tiles import tile_for
from weft.backbone.heads import HeadPass, run_heads
from weft.backbone.judge import run_loss
from weft.backbone.loss import BLOCK, BlockedLoss, Head
from weft.backbone.packed import PackedBatch
from weft.backbone.path import Memory
from weft.backbone.scores import PendingScores
from weft.backbone.shards.ring import LayerRing
from weft.cost.memory import LOSS_ROWS, MemoryModel, rank_class
from weft.cost.rows import CPU_ROW_TILE, gpu_row_tile
from weft.kernels.device import empty_cache, graph_pool, is_gpu, synchronise
from weft.kernels.device_event import DeviceEvent, sent
from weft.kernels.layers.cross_entropy import cross_entropy_rows


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
    ) -> None:
        """`modules`: the table's modules by path; `heads`: those of jobs, by slot."""
        self._heads = heads
        self.table = model.table(model.embedding_VD.device)
        self._model = model
        self.memory = memory
        self._memory_model = memory_model
        self._modules = modules
        self._adapters: dict[int, Adapter] = {}
        self._graphs = CapturedGraphs(self._capture_for, self._settle)
        self._pool: Any = None
        self.captured_s = 0.0
        """Seconds spent on capturing graphs, so far."""
        self._tiles: dict[tuple[int, int | None], int | None] = {}
        self._device = model.embedding_VD.device
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

    @property
    def copy_bytes(self) -> int:
        """Bytes per trainable parameter of the copy that kernels read."""
        return self._model.embedding_VD.element_size()

    def take_slot(self, adapter: Adapter) -> int:
        """Puts an adapter on a free slot of the table and returns the slot."""
        copy = adapter.method.kernel_copy(adapter, self._model.embedding_VD.dtype)
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
        shape = input_shape(batch, with_longest=needs_bounds(self._device))
        goes_back = through or shape.is_adapted
        rows_N, targets_N, weights_N = self._supervised(batch)
        if not self._is_captured:
            passed = self._pass(batch, shape, row_tile, needs_grad=goes_back)
            found = run_loss(self._loss, passed.hidden_TD[rows_N], targets_N, weights_N, batch.judgements)
            grad_TD = torch.zeros_like(passed.hidden_TD)
            headed, taught = self._other_rows(passed.hidden_TD, batch, grad_TD)
            if goes_back:
                assert found.grad_ND is not None
                run_backward(passed, grad_TD.index_copy_(0, rows_N, found.grad_ND))
            return PendingScores(found, batch, begun, headed, taught)
        captured = self._replay(batch, shape, row_tile, goes_back=goes_back)
        found = run_loss(self._loss, captured.hidden_TD[rows_N], targets_N, weights_N, batch.judgements)
        headed, taught = [], []
        if goes_back:
            assert found.grad_ND is not None
            captured.grad_TD.zero_().index_copy_(0, rows_N, found.grad_ND)
            headed, taught = self._other_rows(captured.hidden_TD, batch, captured.grad_TD)
            captured.backward.replay()
            self._went(goes_back=False, is_back=True)
        return PendingScores(found, batch, begun, headed, taught)

    def look(self, batch: PackedBatch, row_tile: int | None) -> PendingScores:
        """Starts a microbatch forward only."""
        begun = DeviceEvent(self._device)
        rows_N, targets_N, _ = self._supervised(batch)
        hidden_TD = self._hidden(batch, row_tile)
        found = run_loss(self._loss, hidden_TD[rows_N], targets_N, None, batch.judgements)
        return PendingScores(found, batch, begun, *self._other_rows(hidden_TD, batch))

    def read(self, batch: PackedBatch, row_tile: int | None) -> torch.Tensor:
        """Starts a microbatch forward only: the last hidden states of its supervised rows (N, D)."""
        return self._hidden(batch, row_tile)[self._supervised(batch)[0]]

    def _other_rows(
        self, hidden_TD: torch.Tensor, batch: PackedBatch, grad_TD: torch.Tensor | None = None
    ) -> tuple[list[HeadPass], list[TaughtPass]]:
        """The rows whose loss is no cross entropy, and what they add to the gradient."""
        headed = run_heads(hidden_TD, batch.heads, self._heads, grad_TD)
        return headed, run_taught(self._loss.head, hidden_TD, batch.taught, grad_TD)

    def _hidden(self, batch: PackedBatch, row_tile: int | None) -> torch.Tensor:
        """The last hidden states of a microbatch that goes forward only; the next one may overwrite them.

        While there are adapters it takes the kernels that their microbatches take, also where it has no row of theirs:
        what a reference says must not depend on which graphs there are, nor wait for the capture of another one.
        """
        shape = input_shape(batch, with_longest=needs_bounds(self._device))
        shape = replace(shape, is_adapted=shape.is_adapted or bool(self._adapters))
        if self._is_captured:
            return self._replay(batch, shape, row_tile, goes_back=False).hidden_TD
        return self._pass(batch, shape, row_tile, needs_grad=False).hidden_TD

    def loss(self, batch: PackedBatch) -> BlockedLoss:
        """What makes losses of the hidden states of a microbatch's supervised rows."""
        return self._loss

    def row_tile(self, capacity: int) -> int:
        """Rows that every frozen product is computed in: whole tiles make up a capacity."""
        return gpu_row_tile(capacity) if is_gpu(self._device) else CPU_ROW_TILE

    def activation_bytes(self, capacity: int, widest_rank: int, keeps: Collection[Keeps] = ()) -> int:
        """What a microbatch may hold between forward and backward, by the memory model."""
        model, tile = self._memory_model, self.row_tile(capacity)
        rows = -(-capacity // tile) * tile
        kept = model.kept_bytes(rows, widest_rank) - (model.offloaded_bytes(rows) if self.memory.offload else 0)
        kept += sum(self._width(kind, widest_rank) for kind in keeps) * rows * self.copy_bytes
        return kept + model.workspace_bytes(rows, widest_rank) + model.loss_bytes()

    def _width(self, kind: Keeps, widest_rank: int) -> int:
        """Numbers of a row that are kept for a method besides S, at most."""
        layers, hidden = self._model.layers, self._model.embedding_VD.shape[1]
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
        self._graphs.forget()
        self._pool = None

    @property
    def _is_captured(self) -> bool:
        # Copies to the machine's memory are timed by streams of their own, which no graph holds.
        ring = self._model.ring
        return is_gpu(self._device) and not self.memory.offload and (ring is None or ring.can_be_recorded)

    def _pass(self, batch: PackedBatch, shape: InputShape, row_tile: int | None, *, needs_grad: bool) -> Passed:
        self._follow(batch)
        inputs = Inputs(shape, torch.from_numpy(input_array(batch, shape)).to(self._device), spans_of(batch))
        tile = self._tile(shape.num_rows, row_tile)
        return run_forward(self._model, inputs, self.table, tile, self.memory, needs_grad=needs_grad)

    def _replay(self, batch: PackedBatch, shape: InputShape, row_tile: int | None, *, goes_back: bool) -> Captured:
        self._follow(batch)
        captured = self._graphs.graph(self._key(shape, row_tile))
        numbers = torch.from_numpy(input_array(batch, captured.inputs.shape))
        captured.inputs.buffer.copy_(numbers.pin_memory(), non_blocking=True)
        if self._model.ring is not None:
            self._model.ring.begin(back=goes_back)
        captured.forward.replay()
        self._went(goes_back=goes_back, is_back=False)
        return captured

    def _went(self, *, goes_back: bool, is_back: bool) -> None:
        """Tells the ring of the way that a graph has taken by itself, and of its end if no way back follows."""
        if self._model.ring is not None:
            self._model.ring.went(back=is_back)
            if not goes_back:
                self._model.ring.end()

    def _key(self, shape: InputShape, row_tile: int | None) -> GraphKey:
        """What a graph for this shape is captured for: nothing of the adapters where none takes part."""
        needs, drops = self.table.needs, self.table.needs.drops and shape.drops and shape.is_adapted
        kernels = replace(needs, drops=drops) if shape.is_adapted else None
        return GraphKey(replace(shape, drops=drops), row_tile, kernels, self.table.version)

    def _settle(self) -> None:
        synchronise(self._device)

    def _tile(self, num_rows: int, row_tile: int | None) -> int | None:
        key = (num_rows, row_tile)
        if key not in self._tiles:
            self._tiles[key] = tile_for(self._model, num_rows, row_tile)
        return self._tiles[key]

    def _capture_for(self, key: GraphKey) -> Captured:
        begun_s = time.perf_counter()
        captured = self._try_capture(key) or self._capture(key)
        self.captured_s += time.perf_counter() - begun_s
        return captured

    def _try_capture(self, key: GraphKey) -> Captured | None:
        """None if memory ended; then there is more of it: graphs of other shapes may have held it in small pieces."""
        with suppress(torch.OutOfMemoryError):
            return self._capture(key)
        # Not in a handler: the error's frames would keep all that the failed capture had made.
        self.forget()
        gc.collect()
        empty_cache(self._device)
        return None

    def _capture(self, key: GraphKey) -> Captured:
        self._pool = self._pool or graph_pool()
        tile = self._tile(key.shape.num_rows, key.row_tile)
        return capture(self._model, key.shape, self.table, tile, self.memory, self._pool)

    def _follow(self, batch: PackedBatch) -> None:
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
