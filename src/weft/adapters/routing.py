"""The routing table: which rows of the current microbatch belong to whom.

One `Routing` object is shared by every module of a backbone and rewritten before each microbatch; modules read it, so
jobs come and go by changing this table and the slots, never the model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows [start, end) of a microbatch."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Window:
    """The rows [start, end) of one slot, and the rows [first, last) of the buffer to compute for them."""

    first: int
    last: int
    start: int
    end: int

    @property
    def own(self) -> slice:
        """The slot's rows among those computed."""
        return slice(self.start - self.first, self.end - self.first)


@dataclass(frozen=True, slots=True)
class SlotRows:
    """Neighbouring segments of one slot."""

    slot: int
    segments: tuple[Rows, ...]
    """In the job's own order, one after another."""
    windows: tuple[Window, ...]
    """They cover the segments; all have one size, so near the end of the buffer one begins earlier."""

    @property
    def start(self) -> int:
        """First row."""
        return self.segments[0].start


def windows(start: int, end: int, size: int | None, num_rows: int) -> tuple[Window, ...]:
    """The windows over rows [start, end) of a buffer of `num_rows` rows; without a size, one of just these rows."""
    if size is None:
        return (Window(start, end, start, end),)
    found = []
    for begin in range(start, end, size):
        first = min(begin, num_rows - size)
        found.append(Window(first, first + size, begin, min(begin + size, end)))
    return tuple(found)


@dataclass
class Routing:
    """The rows of the current microbatch, in order; rows beyond the last segment are padding."""

    segments: tuple[Rows, ...] = ()
    bounds: torch.Tensor | None = None
    """On a GPU: int32, the first row of each segment and, last, the end of the buffer; padding is a segment too."""
    longest: int = 0
    """Rows of the longest segment, padding included."""
    slots: tuple[SlotRows, ...] = ()
    """The rows that an adapter applies to; all others see the bare backbone."""
    dropout_keys_T: torch.Tensor | None = None
    """int32: the key of each row, from its job's seed and step and its place in its sample; None turns dropout off."""
    row_tile: int | None = None
    """Frozen products are computed in blocks of this many rows: at a fixed row count a row's result does not depend on
    its neighbours. None: all rows at once."""
    caches: list[dict[int, Any]] = field(default_factory=list)
    """While generating: per segment, what attention keeps of earlier tokens, by layer; empty while training."""
