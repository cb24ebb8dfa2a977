"""The routing table: which rows of the current microbatch belong to whom.

One `Routing` object is shared by every module of a backbone and rewritten before each microbatch; modules read it, so
jobs come and go by changing this table and the slots, never the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows [start, end) of a microbatch."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Window:
    """Some rows of one slot, and the rows of the buffer to compute for them."""

    computed: slice
    """Rows of the buffer."""
    own: slice
    """The slot's rows, among those of the buffer."""
    inside: slice
    """The slot's rows, among those computed."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """The rows of one sample: among those of the buffer, and among those of its slot."""

    buffer: slice
    slot: slice


@dataclass(frozen=True, slots=True)
class SlotRows:
    """Neighbouring segments of one slot."""

    slot: int
    samples: tuple[Sampled, ...]
    """What gradients are summed by, in the job's own order."""
    begins: tuple[int, ...]
    """Rows of the buffer where a sample begins; none of a sample that goes on from a cache."""
    windows: tuple[Window, ...]
    """They cover the samples; all have one size, so near the end of the buffer one begins earlier."""
    step_key: int | None = None
    """A number of the job's seed and step, for methods that draw something for each step; None: nothing is drawn."""

    @property
    def own(self) -> slice:
        """All of the slot's rows, among those of the buffer, where they lie side by side."""
        return slice(self.samples[0].buffer.start, self.samples[-1].buffer.stop)


def slot_rows(
    slot: int,
    segments: Sequence[Rows],
    window: int | None,
    num_rows: int,
    begins: Sequence[int] = (),
    step_key: int | None = None,
) -> SlotRows:
    """Neighbouring segments of a slot in a buffer of `num_rows` rows; without a window size, one window of them all."""
    start, end = segments[0].start, segments[-1].end
    samples = tuple(Sampled(slice(s.start, s.end), slice(s.start - start, s.end - start)) for s in segments)
    if window is None:
        whole = slice(start, end)
        return SlotRows(slot, samples, tuple(begins), (Window(whole, whole, slice(0, end - start)),), step_key)
    windows = []
    for begin in range(start, end, window):
        first, last = min(begin, num_rows - window), min(begin + window, end)
        windows.append(Window(slice(first, first + window), slice(begin, last), slice(begin - first, last - first)))
    return SlotRows(slot, samples, tuple(begins), tuple(windows), step_key)


@dataclass
class Routing:
    """The rows of the current microbatch, in order; rows beyond the last segment are padding."""

    segments: tuple[Rows, ...] = ()
    bounds: torch.Tensor | None = None
    """On a GPU: int32, the first row of each segment and, last, the end of the buffer; padding is a segment too."""
    longest: int = 0
    """Rows of the longest segment, padding included."""
    tokens: np.ndarray | None = None
    """The token of every row, on the host."""
    slots: tuple[SlotRows, ...] = ()
    """The rows that an adapter applies to; all others see the bare backbone."""
    dropout_keys_T: torch.Tensor | None = None
    """int32: the key of each row, from its job's seed and step and its place in its sample; None turns dropout off."""
    row_tile: int | None = None
    """Frozen products are computed in blocks of this many rows: at a fixed row count a row's result does not depend on
    its neighbours. None: all rows at once."""
    prefixes: dict[int, Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = field(
        default_factory=dict
    )
    """By layer, while adapters hold keys and values there: what puts these in the place of computed ones."""
    caches: list[dict[int, Any]] = field(default_factory=list)
    """While generating: per segment, what attention keeps of earlier tokens, by layer; empty while training."""

    def kept(self) -> Callable[[], None]:
        """Puts back all that the table says now, once another microbatch has been in its place."""
        now = {each.name: getattr(self, each.name) for each in fields(self)}
        return lambda: vars(self).update(now)
