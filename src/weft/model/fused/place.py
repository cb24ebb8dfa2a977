"""Where one microbatch is between its forward and its backward: what the layers keep of it, in memory of its own.

A model in one piece has one such place. A stage of a pipeline has as many as microbatches may be under way there; on a
GPU each has graphs and a pool of memory of its own.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from weft.kernels.device import empty_cache, graph_pool, is_gpu, synchronise
from weft.kernels.lora.tables import SlotTable
from weft.model.fused.captures import CapturedGraphs, GraphKey
from weft.model.fused.graph import Captured, capture
from weft.model.fused.inputs import Inputs, InputShape, input_array, spans_of
from weft.model.fused.model import FusedModel
from weft.model.fused.step import Passed, run_backward, run_forward
from weft.model.packed import PackedBatch
from weft.model.path import Memory

Tile = Callable[[int, int | None], int | None]
"""The rows that a frozen product of so many rows is computed in, given those of the microbatch; None: all at once."""


class InFlightBuffers:
    """Runs a microbatch forward and, when its gradient is known, back: graphs on a GPU, line by line elsewhere."""

    def __init__(self, model: FusedModel, table: SlotTable, memory: Memory, tile: Tile, lane: int = 0) -> None:
        """`lane`: places of one are never at work at the same time."""
        self._model, self._table, self._memory = model, table, memory
        self._tile, self._lane = tile, lane
        self._graphs = CapturedGraphs(self._capture_for, lambda: synchronise(model.device))
        self._pool: Any = None
        self._held: Passed | Captured | None = None
        """Of the microbatch that is here."""
        self._num_rows = 0
        """Of that microbatch; a graph may have more."""
        self.captured_s = 0.0
        """Seconds spent on capturing graphs, so far."""

    def forward(
        self,
        batch: PackedBatch,
        shape: InputShape,
        row_tile: int | None,
        entering_TD: torch.Tensor | None = None,
        *,
        needs_grad: bool,
    ) -> torch.Tensor:
        """What leaves the last layer; the next microbatch may overwrite it. It has at least the rows of this one."""
        self._num_rows = batch.num_rows
        if self._is_captured:
            return self._replay(batch, shape, row_tile, entering_TD, needs_grad=needs_grad)
        inputs = Inputs(shape, torch.from_numpy(input_array(batch, shape)).to(self._model.device), spans_of(batch))
        tile = self._tile(shape.num_rows, row_tile)
        passed = run_forward(self._model, inputs, self._table, tile, self._memory, entering_TD, needs_grad=needs_grad)
        self._held = passed if needs_grad else None
        return passed.left_TD

    def zero_gradient(self) -> torch.Tensor:
        """Zeros for the gradient of what left, to be filled in and given to `backward`."""
        held = self._held
        assert held is not None, "nothing goes back"
        return held.grad_TD.zero_() if isinstance(held, Captured) else torch.zeros_like(held.left_TD)

    def backward(self, grad_TD: torch.Tensor) -> torch.Tensor | None:
        """Adds to the adapters' gradients, given that of what left; returns that of what entered, if anybody waits.

        The next microbatch may overwrite it. The place is free then.
        """
        held, self._held = self._held, None
        assert held is not None, "nothing went forward"
        if isinstance(held, Passed):
            return run_backward(held, grad_TD)
        if grad_TD is not held.grad_TD:
            held.grad_TD[self._num_rows :].zero_()
            held.grad_TD[: self._num_rows].copy_(grad_TD)
        if self._model.ring is not None:
            self._model.ring.begin(back=True)
        held.backward.replay()
        self._went(back=True, then_back=False)
        return None if held.back_TD is None else held.back_TD[: self._num_rows]

    def clear(self) -> None:
        """Lets go of the microbatch that is here, if any."""
        self._held = None

    def forget(self) -> None:
        """Gives captured graphs and their memory back."""
        self._graphs.forget()
        self._pool = None

    @property
    def _is_captured(self) -> bool:
        ring, devices = self._model.ring, self._model.devices
        if not is_gpu(self._model.device) or (devices is not None and devices.runs_pairs):
            return False
        # Copies to the machine's memory are timed by streams of their own, which no graph holds.
        met = [other for other in (ring, devices) if other is not None]
        return not self._memory.offload and all(other.can_be_recorded for other in met)

    def _replay(
        self,
        batch: PackedBatch,
        shape: InputShape,
        row_tile: int | None,
        entering_TD: torch.Tensor | None,
        *,
        needs_grad: bool,
    ) -> torch.Tensor:
        captured = self._held = self._graphs.graph(self._key(shape, row_tile))
        numbers = torch.from_numpy(input_array(batch, captured.inputs.shape))
        captured.inputs.buffer.copy_(numbers.pin_memory(), non_blocking=True)
        if entering_TD is not None:
            assert captured.entering_TD is not None, "tokens enter the first part of a model"
            captured.entering_TD[: batch.num_rows].copy_(entering_TD)
        if self._model.ring is not None:
            self._model.ring.begin(back=False)
        captured.forward.replay()
        self._went(back=False, then_back=needs_grad)
        return captured.left_TD

    def _went(self, *, back: bool, then_back: bool) -> None:
        """Tells the ring of the way that a graph has taken by itself."""
        if self._model.ring is not None:
            self._model.ring.went(back=back)
            self._model.ring.end(then_back=then_back)

    def _key(self, shape: InputShape, row_tile: int | None) -> GraphKey:
        """What a graph for this shape is captured for: nothing of the adapters where none takes part."""
        needs, drops = self._table.needs, self._table.needs.drops and shape.drops and shape.is_adapted
        kernels = replace(needs, drops=drops) if shape.is_adapted else None
        return GraphKey(replace(shape, drops=drops), row_tile, kernels, self._table.version)

    def _capture_for(self, key: GraphKey) -> Captured:
        begun_s = time.perf_counter()
        # Devices that share layers run the same all the time: one that began again would wait for others in vain.
        can_try_again = self._model.devices is None
        captured = (self._try_capture(key) if can_try_again else None) or self._capture(key)
        self.captured_s += time.perf_counter() - begun_s
        return captured

    def _try_capture(self, key: GraphKey) -> Captured | None:
        """None if memory ended; then there is more of it: graphs of other shapes may have held it in small pieces."""
        with suppress(torch.OutOfMemoryError):
            return self._capture(key)
        # Not in a handler: the error's frames would keep all that the failed capture had made.
        self.forget()
        gc.collect()
        empty_cache(self._model.device)
        return None

    def _capture(self, key: GraphKey) -> Captured:
        self._pool = self._pool or graph_pool()
        tile = self._tile(key.shape.num_rows, key.row_tile)
        return capture(self._model, key.shape, self._table, tile, self._memory, self._pool, self._lane)
