"""A step captured once and replayed for every microbatch of its shape.

The graph holds addresses, and all that differs between microbatches lies behind them: the input buffer, the slot
table, the adapters' weights. So jobs come and go without a new capture, unless they are the first with such ranks or
with dropout, which take kernels of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from weft.kernels.device import Graph, Stream, beside, empty_cache, record, synchronise
from weft.kernels.lora.tables import SlotTable
from weft.model.fused.inputs import Inputs, InputShape
from weft.model.fused.model import FusedModel
from weft.model.fused.step import run_backward, run_forward
from weft.model.out_of_memory import memory_errors
from weft.model.path import Memory


@dataclass(frozen=True)
class Captured:
    """Two graphs with the loss in between, which runs over as many rows as there are supervised ones."""

    inputs: Inputs
    entering_TD: torch.Tensor | None
    """Read by `forward`, where the part of the model before this one makes it."""
    left_TD: torch.Tensor
    """Written by `forward`."""
    grad_TD: torch.Tensor
    """Read by `backward`."""
    back_TD: torch.Tensor | None
    """Written by `backward`, where somebody waits for it."""
    forward: Graph
    backward: Graph


@memory_errors()
def capture(
    model: FusedModel, shape: InputShape, table: SlotTable, row_tile: int | None, memory: Memory, pool: Any, lane: int
) -> Captured:
    """Captures the step for microbatches of a shape; `pool` is memory that other captured graphs may use too.

    Graphs of one `lane` never run at the same time.
    """
    device = model.device
    # With empty tables no row has an owner, so the runs below add to no gradient.
    buffer = torch.zeros(shape.layout["end"][0], dtype=torch.int32, device=device)
    inputs = Inputs(shape, buffer)
    grad_TD = torch.zeros(shape.num_rows, model.hidden, dtype=model.dtype, device=device)
    entering_TD = None if model.is_first else torch.zeros_like(grad_TD)
    arguments = (model, inputs, table, row_tile, memory, entering_TD)
    stream = _stream(device, lane)
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
def _stream(device: torch.device, lane: int) -> Stream:
    """One for all captures of a lane: cuBLAS takes a workspace for every stream it meets and never gives it back, and
    graphs that hold the same workspace must not run at the same time."""
    return Stream(device)
