"""Packed tensors of one microbatch, made from samples and where they go.

Row i of a segment holds token i and predicts token i + 1. Shape suffixes: T rows, N supervised rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weft.adapters.dropout import row_keys
from weft.adapters.routing import Rows, SlotRows, slot_rows
from weft.data.sample import Sample

ADAPTER_WINDOW = 64
"""Rows per adapter product on a CPU; it divides the tile of frozen products. Fixed, so that no row's result depends on
its neighbours; smaller wastes less on short jobs, larger needs fewer calls for long ones."""


@dataclass(frozen=True)
class Placed:
    """A sample with the slot it trains."""

    sample: Sample
    slot: int | None = None
    weight: float = 1.0
    """What each of its supervised tokens counts in the gradient: 1 / supervised tokens of the job's global batch."""
    dropout_key: int | None = None
    position: int = 0
    """Position of its first token; above 0 when earlier tokens are cached."""


@dataclass(frozen=True)
class PackedBatch:
    """What the backbone needs to run one microbatch."""

    input_ids_T: torch.Tensor
    positions_T: torch.Tensor
    segments: tuple[Rows, ...]
    bounds: torch.Tensor | None
    """On a GPU: int32, where each segment begins and, last, where the buffer ends; padding is a segment too."""
    longest: int
    """Rows of the longest segment, padding included."""
    slots: tuple[SlotRows, ...]
    dropout_keys_T: torch.Tensor | None
    supervised_N: torch.Tensor
    """Rows that predict a supervised token."""
    targets_N: torch.Tensor
    weights_N: torch.Tensor
    counts: tuple[int, ...]
    """Supervised rows of each segment; they lie in segment order in the N-long tensors."""

    @property
    def num_tokens(self) -> int:
        """Rows that hold a token."""
        return self.segments[-1].end if self.segments else 0


def pack_samples(placed: Sequence[Placed], row_tile: int | None, device: torch.device) -> PackedBatch:
    """One sample after another in one buffer, padded to whole tiles.

    On a GPU only frozen products are tiled; a slot's adapter products and gradients run over all its rows at once,
    since small products would leave it idle. There, results with other neighbours are equal to rounding.
    """
    lengths = [p.sample.length for p in placed]
    starts = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    num_rows = starts[-1] if row_tile is None else -(-starts[-1] // row_tile) * row_tile
    ids = np.zeros(num_rows, dtype=np.int64)
    positions = np.zeros(num_rows, dtype=np.int64)
    keys = np.zeros(num_rows, dtype=np.int32)
    rows, targets, weights, counts = [], [], [], []
    for item, start, length in zip(placed, starts, lengths, strict=False):
        ids[start : start + length] = item.sample.tokens
        positions[start : start + length] = np.arange(item.position, item.position + length)
        if item.dropout_key is not None:
            keys[start : start + length] = row_keys(item.dropout_key, length)
        predicted = np.flatnonzero(item.sample.supervised[1:]) + 1
        rows.append(predicted - 1 + start)
        targets.append(item.sample.tokens[predicted])
        weights.append(np.full(len(predicted), item.weight, dtype=np.float32))
        counts.append(len(predicted))
    segments = tuple(Rows(start, start + length) for start, length in zip(starts, lengths, strict=False))
    window = ADAPTER_WINDOW if row_tile is not None and device.type == "cpu" else None
    edges = starts if starts[-1] == num_rows else [*starts, num_rows]
    drops = any(item.dropout_key is not None for item in placed)

    def tensor(parts: list[np.ndarray], dtype: type) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(dtype)).to(device)

    return PackedBatch(
        torch.from_numpy(ids).to(device),
        torch.from_numpy(positions).to(device),
        segments,
        torch.tensor(edges, dtype=torch.int32, device=device) if device.type == "cuda" else None,
        max(end - start for start, end in itertools.pairwise(edges)),
        _slot_rows(placed, segments, window, num_rows, per_sample=device.type == "cpu"),
        torch.from_numpy(keys).to(device) if drops else None,
        tensor(rows, np.int64),
        tensor(targets, np.int64),
        tensor(weights, np.float32),
        tuple(counts),
    )


def _slot_rows(
    placed: Sequence[Placed], segments: Sequence[Rows], window: int | None, num_rows: int, *, per_sample: bool
) -> tuple[SlotRows, ...]:
    """Neighbouring segments of one slot, together; as one segment unless gradients are summed `per_sample`."""
    found = []
    for slot, group in itertools.groupby(zip(placed, segments, strict=True), key=lambda pair: pair[0].slot):
        if slot is not None:
            own = [segment for _, segment in group]
            summed = own if per_sample else [Rows(own[0].start, own[-1].end)]
            found.append(slot_rows(slot, summed, window, num_rows))
    return tuple(found)
