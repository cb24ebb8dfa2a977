"""Everything a microbatch brings to the device, in one buffer of fixed layout, and the attention that reads it.

One buffer is one transfer, and lets one captured graph serve many microbatches. Attention is causal inside samples: on
a GPU from Hopper on, and on a CPU, by kernels/layers/attention.py; on older GPUs by torch's variable-length kernel.

Shape suffixes: T rows, N tiles, J owners, G samples; E all heads of q, k and v side by side, H query heads, K key/value
heads, C head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from weft.kernels.launch import cdiv, next_power_of_2
from weft.kernels.layers.attention import BLOCK, AttentionBlocks, attend, attention_blocks
from weft.kernels.layers.attention_grad import attend_grad
from weft.kernels.layers.rotary import Heads
from weft.kernels.lora.tables import RowTables, SampleRows, TableSizes, table_arrays
from weft.model.packed import PackedBatch
from weft.model.packing.attention import in_fixed_order, needs_bounds, varlen

MIN_SPANS = 16
MIN_REFERENCE_SPANS = 32
"""Minimum number of spans for attention that needs their bounds. Its backward, with fewer spans, divides the queries of
one sample among multiprocessors, and the order of the sum then depends on the number of samples."""
MIN_LONGEST = 256


@dataclass(frozen=True)
class InputShape:
    """The properties that microbatches with one captured graph share; none changes a result."""

    num_rows: int
    num_spans: int
    """Capacity for samples: a power of two."""
    longest: int
    """Upper bound of sample lengths: a power of two; 0 if attention does not need it."""
    is_adapted: bool
    drops: bool

    @property
    def sizes(self) -> TableSizes:
        return TableSizes(self.num_rows, self.num_spans)

    @functools.cached_property
    def layout(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        shapes: dict[str, tuple[int, ...]] = {
            "ids": (self.num_rows,),
            "positions": (self.num_rows,),
            "keys": (self.num_rows,),
            **self.sizes.shapes,
            "blocks": (cdiv(self.num_rows, BLOCK) + self.num_spans, 4),
            "bounds": (self.num_spans + 1,),
        }
        found, start = {}, 0
        for name, shape in shapes.items():
            found[name] = (start, shape)
            # Kernels read the tables in whole vectors.
            start += -(-int(np.prod(shape)) // 32) * 32
        found["end"] = (start, ())
        return found


def input_shape(batch: PackedBatch, *, with_longest: bool) -> InputShape:
    longest = max(segment.end - segment.start for segment in batch.segments)
    return InputShape(
        batch.num_rows,
        max(MIN_REFERENCE_SPANS if with_longest else MIN_SPANS, next_power_of_2(len(batch.segments))),
        max(MIN_LONGEST, next_power_of_2(longest)) if with_longest else 0,
        any(slot is not None for slot in batch.segment_slots),
        batch.drops,
    )


def input_array(batch: PackedBatch, shape: InputShape) -> np.ndarray:
    buffer = np.zeros(shape.layout["end"][0], dtype=np.int32)

    def put(name: str, values: np.ndarray) -> None:
        start = shape.layout[name][0]
        buffer[start : start + values.size] = values.reshape(-1)

    put("ids", batch.ids)
    put("positions", batch.positions)
    put("keys", batch.keys)
    for name, table in table_arrays(batch.spans, shape.sizes).items():
        put(name, table)
    put("blocks", attention_blocks(batch.spans, shape.num_rows, shape.num_spans))
    # Unused samples are empty ones at the end. Padding rows are in no sample: attention leaves them undefined, and
    # nothing reads them.
    ends = [segment.end for segment in batch.segments]
    put("bounds", np.array([0, *ends, *[ends[-1]] * (shape.num_spans - len(ends))], dtype=np.int32))
    return buffer


@dataclass(frozen=True)
class Inputs:
    shape: InputShape
    buffer: torch.Tensor
    spans: tuple[SampleRows, ...] = ()
    """Samples for the kernels' reference implementations; kernels read the tables."""
    is_step: bool = False
    """Whether these are the rows of a decoding step: few, and of any number of owners."""

    def part(self, name: str) -> torch.Tensor:
        start, shape = self.shape.layout[name]
        return self.buffer[start : start + int(np.prod(shape))].view(shape)

    @functools.cached_property
    def rows(self) -> RowTables:
        tables = {name: self.part(name) for name in self.shape.sizes.shapes}
        return RowTables(
            self.shape.num_rows,
            self.spans,
            **tables,
            keys_T=self.part("keys"),
            drops=self.shape.drops,
        )


QkvParts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""q_THC, k_TKC, v_TKC or their gradients."""


@dataclass(frozen=True)
class Attended:
    output_THC: torch.Tensor
    gradients: Callable[[torch.Tensor], QkvParts]
    """From the gradient of the output to those of q, k and v; equal inputs give equal bits."""


def attention(
    qkv_TE: torch.Tensor, heads: Heads, inputs: Inputs, scale: float, window: int | None, *, needs_grad: bool
) -> Attended:
    """Attention of concatenated q, k and v, each query within its own sample; padding rows are undefined."""
    q_THC, k_TKC, v_TKC = qkv_parts(qkv_TE, heads)
    if needs_bounds(qkv_TE.device):
        return _torch_attention((q_THC, k_TKC, v_TKC), inputs, scale, window, needs_grad=needs_grad)
    blocks = AttentionBlocks(inputs.part("blocks"), inputs.spans)
    out_THC, lse_HT = attend(q_THC, k_TKC, v_TKC, blocks, scale, window)

    def gradients(grad_THC: torch.Tensor) -> QkvParts:
        dqkv_TE = attend_grad(grad_THC, q_THC, k_TKC, v_TKC, out_THC, lse_HT, blocks, scale, window)
        return qkv_parts(dqkv_TE, heads)

    return Attended(out_THC, gradients)


def no_gradients(grad_THC: torch.Tensor) -> QkvParts:
    raise AssertionError("nothing goes back through keys and values of earlier passes")


def qkv_parts(qkv_TE: torch.Tensor, heads: Heads) -> QkvParts:
    q, k, v = (part.unflatten(1, (-1, heads.size)) for part in qkv_TE.split(heads.sizes, dim=1))
    return q, k, v


def _torch_attention(
    parts: QkvParts, inputs: Inputs, scale: float, window: int | None, *, needs_grad: bool
) -> Attended:
    q, k, v = (part.detach().requires_grad_(needs_grad) for part in parts)
    with torch.set_grad_enabled(needs_grad):
        output_THC = varlen(q, k, v, inputs.part("bounds"), inputs.shape.longest, scale, window)
    return Attended(output_THC.detach(), partial(_torch_gradients, output_THC, (q, k, v)))


def _torch_gradients(output_THC: torch.Tensor, leaves: QkvParts, grad_THC: torch.Tensor) -> QkvParts:
    with in_fixed_order():
        dq, dk, dv = torch.autograd.grad(output_THC, leaves, grad_THC)
    return dq, dk, dv
