"""Everything a microbatch brings to the device, in one buffer of fixed layout: one transfer, one captured graph.

Shape suffixes: T rows, N tiles, J owners, G samples.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from weft.kernels.launch import cdiv, next_power_of_2
from weft.kernels.layers.attention import BLOCK, attention_blocks
from weft.kernels.lora.tables import BARE, RowTables, SampleRows, TableSizes, table_arrays
from weft.model.packed import PackedBatch

MIN_SPANS = 16
MIN_REFERENCE_SPANS = 32
"""Where attention is told of the samples: with fewer, its backward shares the queries of one out among multiprocessors,
and adds their parts in an order that depends on how many samples there are."""
MIN_LONGEST = 256


@dataclass(frozen=True)
class InputShape:
    """What microbatches must have in common to share a captured graph; none of it changes a result."""

    num_rows: int
    num_spans: int
    """Samples there is room for: a power of two."""
    longest: int
    """No sample is longer: a power of two; 0 where attention does not ask."""
    is_adapted: bool
    """Whether any row has an adapter."""
    drops: bool
    """Whether dropout applies."""

    @property
    def sizes(self) -> TableSizes:
        """Of the tables."""
        return TableSizes(self.num_rows, self.num_spans)

    @functools.cached_property
    def layout(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Where each part of the buffer begins, and its shape."""
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
    """The smallest shape that fits a microbatch."""
    longest = max(segment.end - segment.start for segment in batch.segments)
    return InputShape(
        batch.num_rows,
        max(MIN_REFERENCE_SPANS if with_longest else MIN_SPANS, next_power_of_2(len(batch.segments))),
        max(MIN_LONGEST, next_power_of_2(longest)) if with_longest else 0,
        any(slot is not None for slot in batch.segment_slots),
        batch.drops,
    )


def input_array(batch: PackedBatch, shape: InputShape) -> np.ndarray:
    """The buffer's contents for a microbatch, int32."""
    buffer = np.zeros(shape.layout["end"][0], dtype=np.int32)

    def put(name: str, values: np.ndarray) -> None:
        start = shape.layout[name][0]
        buffer[start : start + values.size] = values.reshape(-1)

    put("ids", batch.ids)
    put("positions", batch.positions)
    put("keys", batch.keys)
    spans = spans_of(batch)
    for name, table in table_arrays(spans, shape.sizes).items():
        put(name, table)
    put("blocks", attention_blocks(spans, shape.num_rows, shape.num_spans))
    # Unused samples are empty ones at the end. Padding rows are in no sample: attention leaves them undefined, and
    # nothing reads them.
    ends = [segment.end for segment in batch.segments]
    put("bounds", np.array([0, *ends, *[ends[-1]] * (shape.num_spans - len(ends))], dtype=np.int32))
    return buffer


def spans_of(batch: PackedBatch) -> tuple[SampleRows, ...]:
    """The samples with their slots in the table."""
    pairs = zip(batch.segments, batch.segment_slots, strict=True)
    return tuple(SampleRows(rows.start, rows.end, BARE if slot is None else slot) for rows, slot in pairs)


@dataclass(frozen=True)
class Inputs:
    """The buffer on the device, read part by part."""

    shape: InputShape
    buffer: torch.Tensor
    spans: tuple[SampleRows, ...] = ()
    """For the plain twins of the kernels; kernels read the tables."""

    def part(self, name: str) -> torch.Tensor:
        """A part of the buffer in its shape."""
        start, shape = self.shape.layout[name]
        return self.buffer[start : start + int(np.prod(shape))].view(shape)

    @functools.cached_property
    def rows(self) -> RowTables:
        """Who owns which rows."""
        tables = {name: self.part(name) for name in self.shape.sizes.shapes}
        return RowTables(self.shape.num_rows, self.spans, **tables, keys_T=self.part("keys"), drops=self.shape.drops)
