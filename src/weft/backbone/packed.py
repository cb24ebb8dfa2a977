"""Packed tensors of one microbatch, made from samples and where they go.

Row i of a segment holds token i and predicts token i + 1. Shape suffixes: T rows, N supervised rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weft.adapters.routing import Rows
from weft.data.sample import Sample


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
    """One sample after another in one buffer, padded to whole tiles."""
    lengths = [p.sample.length for p in placed]
    starts = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    num_rows = starts[-1] if row_tile is None else -(-starts[-1] // row_tile) * row_tile
    ids = np.zeros(num_rows, dtype=np.int64)
    positions = np.zeros(num_rows, dtype=np.int64)
    rows, targets, weights, counts = [], [], [], []
    for item, start, length in zip(placed, starts, lengths, strict=False):
        ids[start : start + length] = item.sample.tokens
        positions[start : start + length] = np.arange(item.position, item.position + length)
        predicted = np.flatnonzero(item.sample.supervised[1:]) + 1
        rows.append(predicted - 1 + start)
        targets.append(item.sample.tokens[predicted])
        weights.append(np.full(len(predicted), item.weight, dtype=np.float32))
        counts.append(len(predicted))
    segments = tuple(
        Rows(start, start + length, item.slot, item.dropout_key)
        for item, start, length in zip(placed, starts, lengths, strict=False)
    )

    def tensor(parts: list[np.ndarray], dtype: type) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(dtype)).to(device)

    return PackedBatch(
        torch.from_numpy(ids).to(device),
        torch.from_numpy(positions).to(device),
        segments,
        tensor(rows, np.int64),
        tensor(targets, np.int64),
        tensor(weights, np.float32),
        tuple(counts),
    )
