"""A microbatch between its forward and its backward, and the captured graphs that run it on a GPU.

A model in one piece has one `InFlightBuffers`. A stage of a pipeline has as many as microbatches may be in flight
there; on a GPU each has graphs and a pool of memory of its own.

A step is captured once and replayed for every microbatch of its shape. The graph holds addresses, and all that differs
between microbatches is read from them: the input buffer, the slot table, the adapters' weights. So jobs come and go
without a new capture, unless they are the first with such ranks or with dropout, which take kernels of their own.

A graph also serves smaller microbatches, narrower adapters and fewer samples than it was captured for: unused rows cost
time and change no result. A capture costs time too. So evaluations and the microbatches at the end of a run take a
graph that is already there, until what it wasted on their kind would have paid for a graph of their own."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from weft.kernels.device import (
    Graph,
    Stream,
    beside,
    empty_cache,
    graph_pool,
    is_gpu,
    memory_errors,
    record,
    synchronise,
)
from weft.kernels.lora.tables import Needs, SlotTable
from weft.model.fused.inputs import Inputs, InputShape, input_array
from weft.model.fused.model import FusedModel
from weft.model.fused.step import Passed, run_backward, run_forward
from weft.model.packed import PackedBatch
from weft.model.path import Memory


@dataclass(frozen=True)
class Captured:
    """Two graphs, with the loss in between, which runs over the actual number of supervised rows."""

    inputs: Inputs
    entering_TD: torch.Tensor | None
    left_TD: torch.Tensor
    grad_TD: torch.Tensor
    back_TD: torch.Tensor | None
    """Output of `backward`, if an earlier part needs it."""
    forward: Graph
    backward: Graph


@memory_errors()
def capture(
    model: FusedModel, shape: InputShape, table: SlotTable, row_tile: int | None, memory: Memory, pool: Any, lane: int
) -> Captured:
    """Captures the step for microbatches of a shape; `pool` is memory that other captured graphs may use too. Graphs of
    one `lane` never run at the same time."""
    device = model.device
    # With empty tables no row has an owner, so the runs below add to no gradient.
    buffer = torch.zeros(shape.layout["end"][0], dtype=torch.int32, device=device)
    inputs = Inputs(shape, buffer)
    grad_TD = torch.zeros(shape.num_rows, model.hidden, dtype=model.dtype, device=device)
    entering_TD = None if model.is_first else torch.zeros_like(grad_TD)
    arguments = (model, inputs, table, row_tile, memory, entering_TD)
    stream = capture_stream(device, lane)
    with beside(device, stream):
        # Once in the open: kernels are compiled and libraries set up, which must not happen inside a capture.
        run_backward(run_forward(*arguments, needs_grad=True), grad_TD)
    synchronise(device)
    empty_cache(device)
    with record(pool=pool, stream=stream) as forward:
        passed = run_forward(*arguments, needs_grad=True)
    with record(pool=pool, stream=stream) as backward:
        back_TD = run_backward(passed, grad_TD)
    return Captured(inputs, entering_TD, passed.left_TD, grad_TD, back_TD, forward, backward)


@lru_cache(maxsize=64)
def capture_stream(device: torch.device, lane: int = 0) -> Stream:
    """The stream of all captures of a lane: cuBLAS never frees a stream's workspace, and graphs that share a
    workspace must not run at the same time."""
    return Stream(device)


MAX_GRAPHS = 16
"""Number of graphs kept; they share their memory, so each costs little beyond the time of its capture."""
CAPTURE_COST = 4
"""Cost of a capture in microbatches."""
OVERHEAD = 32
"""Inverse of the share of a graph's rows that counts as wasted if only its kernels are wider than needed."""


@dataclass(frozen=True)
class GraphKey:
    shape: InputShape
    row_tile: int | None
    needs: Needs | None
    version: int

    def serves(self, wanted: GraphKey) -> bool:
        """Whether its graph computes the same for a microbatch with another key."""
        own, other = self.shape, wanted.shape
        return (
            (self.row_tile, self.version) == (wanted.row_tile, wanted.version)
            and own.num_rows >= other.num_rows
            and own.num_spans >= other.num_spans
            and own.longest >= other.longest
            and self._is_wide_enough(wanted.needs)
        )

    def _is_wide_enough(self, wanted: Needs | None) -> bool:
        if wanted is None:
            return True
        own = self.needs
        # Dropout applies to all rows of a graph or to none, and a row is rounded by its own class of ranks.
        return (
            own is not None
            and own.drops == wanted.drops
            and own.rank_class >= wanted.rank_class
            and set(own.classes) >= set(wanted.classes)
            and set(own.others) >= set(wanted.others)
        )


class CapturedGraphs:
    """The graphs of a path; the least recently used are dropped first."""

    def __init__(self, capture: Callable[[GraphKey], Captured], synchronise: Callable[[], None]) -> None:
        self._capture = capture
        self._synchronise = synchronise
        self._graphs: dict[GraphKey, Captured] = {}
        self._wasted: Counter[GraphKey] = Counter()

    def graph(self, wanted: GraphKey) -> Captured:
        key = self._choose(wanted)
        if key not in self._graphs:
            if any(known.version != wanted.version for known in self._graphs):
                self.forget()
            self._let_go(len(self._graphs) + 1 - MAX_GRAPHS)
            self._graphs[key] = self._capture(key)
        self._graphs[key] = self._graphs.pop(key)  # the last used goes last
        return self._graphs[key]

    def forget(self) -> None:
        self._let_go(len(self._graphs))
        self._wasted.clear()

    def _choose(self, wanted: GraphKey) -> GraphKey:
        """The captured key that wastes least, or the wanted one if it is captured or worth its capture."""
        fit = [key for key in self._graphs if key.serves(wanted)]
        if wanted in self._graphs or not fit:
            return wanted
        # The first of equals, whichever order they were used in.
        found = min(fit, key=lambda key: (key.shape.num_rows, key.shape.num_spans, key.shape.longest, str(key.needs)))
        rows = found.shape.num_rows
        self._wasted[wanted] += rows - wanted.shape.num_rows + rows // OVERHEAD
        return wanted if self._wasted[wanted] > CAPTURE_COST * rows else found

    def _let_go(self, number: int) -> None:
        if number > 0:
            self._synchronise()
        for key in list(self._graphs)[: max(0, number)]:
            del self._graphs[key]


Tile = Callable[[int, int | None], int | None]
"""Rows per block of a frozen product of this many rows, given the microbatch's row tile; None: all at once."""


class InFlightBuffers:
    """Runs a microbatch forward and, once its gradient is known, backward: as graphs on a GPU."""

    def __init__(self, model: FusedModel, table: SlotTable, memory: Memory, tile: Tile, lane: int = 0) -> None:
        """`lane`: buffers of one lane are never in use at the same time."""
        self._model, self._table, self._memory = model, table, memory
        self._tile, self._lane = tile, lane
        self._graphs = CapturedGraphs(self._capture_for, lambda: synchronise(model.device))
        self._pool: Any = None
        self._held: Passed | Captured | None = None
        self._num_rows = 0
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
        """The output of the last layer, with at least the microbatch's rows; the next microbatch may overwrite it."""
        self._num_rows = batch.num_rows
        if self._is_captured:
            return self._replay(batch, shape, row_tile, entering_TD, needs_grad=needs_grad)
        inputs = Inputs(shape, torch.from_numpy(input_array(batch, shape)).to(self._model.device), batch.spans)
        tile = self._tile(shape.num_rows, row_tile)
        passed = run_forward(self._model, inputs, self._table, tile, self._memory, entering_TD, needs_grad=needs_grad)
        self._held = passed if needs_grad else None
        return passed.left_TD

    def zero_gradient(self) -> torch.Tensor:
        held = self._held
        assert held is not None, "nothing goes back"
        return held.grad_TD.zero_() if isinstance(held, Captured) else torch.zeros_like(held.left_TD)

    def backward(self, grad_TD: torch.Tensor) -> torch.Tensor | None:
        """Adds to the adapters' gradients, given that of the output; returns that of the input, if it is needed. The
        next microbatch may overwrite it. The buffers are free then."""
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
        self._held = None

    def forget(self) -> None:
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
        if self._model.ring is not None:
            self._model.ring.went(back=back)
            self._model.ring.end(then_back=then_back)

    def _key(self, shape: InputShape, row_tile: int | None) -> GraphKey:
        """The key of a graph for this shape, without the adapters if none takes part."""
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
        """None if memory ran out; dropped graphs of other shapes may have fragmented it."""
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
