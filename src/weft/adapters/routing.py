"""The routing table: which rows of the current microbatch belong to which slot and sample.

One `Routing` object is shared by every module of a backbone and rewritten before each microbatch; modules read it, so
jobs come and go by changing this table and the slots, never the model. Gradients are summed over the rows of one sample
at a time, in fp32 (`add_product`), and over samples where their order must not matter (`AnyOrderSums`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch

from weft.kernels.fixed_point import FixedPointSum, SumWords
from weft.kernels.layers.attention import AttentionBlocks
from weft.kernels.lora.linears import KernelRows


@dataclass(frozen=True, slots=True)
class Rows:
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Window:
    """Some rows of one slot, and the rows of the buffer to compute for them."""

    computed: slice
    """Rows of the buffer."""
    own: slice
    """The slot's rows, as rows of the buffer."""
    inside: slice
    """The slot's rows, as rows of `computed`."""


@dataclass(frozen=True, slots=True)
class Sampled:
    buffer: slice
    slot: slice


@dataclass(frozen=True, slots=True)
class SlotRows:
    slot: int
    samples: tuple[Sampled, ...]
    """Samples in the job's own order, in which their gradients are added up."""
    begins: tuple[int, ...]
    """Rows of the buffer where a sample begins, without samples that continue from a cache."""
    windows: tuple[Window, ...]
    """Windows that cover the samples. All have one size, so near the end of the buffer one begins earlier."""
    step_key: int | None = None
    """Number derived from the job's seed and step, for methods that draw random numbers; else None."""

    @property
    def own(self) -> slice:
        """All rows of the slot, as rows of the buffer, if they are adjacent."""
        return slice(self.samples[0].buffer.start, self.samples[-1].buffer.stop)


def slot_rows(
    slot: int,
    segments: Sequence[Rows],
    window: int | None,
    num_rows: int,
    begins: Sequence[int] = (),
    step_key: int | None = None,
) -> SlotRows:
    """Neighbouring segments of a slot in a buffer of `num_rows` rows; without a window size, one window."""
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
    blocks: AttentionBlocks | None = None
    """The segments, for the attention kernels of kernels/layers/attention.py where a GPU has them."""
    bounds: torch.Tensor | None = None
    """The same for torch's, on other GPUs, int32: the first row of each segment, then the end of the buffer; padding
    counts as a segment."""
    longest: int = 0
    tokens: np.ndarray | None = None
    slots: tuple[SlotRows, ...] = ()
    by_kernels: KernelRows | None = None
    """The rows of slots whose LoRA at linears kernels run (`slots.py`); they are among `slots` too."""
    dropout_keys_T: torch.Tensor | None = None
    """Dropout key of each row (int32), from its job's seed and step and its index in its sample; None: no dropout."""
    row_tile: int | None = None
    """Rows per block of frozen products: with a fixed row count a row's result does not depend on its neighbours.
    None: all rows at once."""
    prefixes: dict[int, Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = field(
        default_factory=dict
    )
    """By layer, a function that replaces leading keys and values, while adapters train those."""
    caches: list[dict[Any, Any]] = field(default_factory=list)
    """While generating: per segment, attention's cache of earlier tokens by layer, and mixers' states; empty in
    training."""

    def kept(self) -> Callable[[], None]:
        """Returns a function that restores the current table after another microbatch has replaced it."""
        now = {each.name: getattr(self, each.name) for each in fields(self)}
        return lambda: vars(self).update(now)


def add_product(grad_MN: torch.Tensor, left_LM: torch.Tensor, right_LN: torch.Tensor, scale: float) -> None:
    """Grad (fp32) += scale · leftᵀ right, summed in fp32 whatever the type of the factors."""
    if left_LM.dtype is torch.float32:
        grad_MN.addmm_(left_LM.t(), right_LN, alpha=scale)
    elif left_LM.is_cuda:
        grad_MN.add_(torch.mm(left_LM.t(), right_LN, out_dtype=torch.float32), alpha=scale)
    else:
        grad_MN.addmm_(left_LM.t().float(), right_LN.float(), alpha=scale)


def joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class AnyOrderSums:
    """The gradients of one site in an adapter with order-independent sums. Methods add to the fp32 buffers as always.
    After each sample its gradients are taken from the buffers, and when the global batch is complete the sum of all
    samples is written back."""

    def __init__(self, groups: Sequence[str], grads: Sequence[torch.Tensor]) -> None:
        """`grads`: views of the adapter's buffers of these groups; those of frozen groups are empty."""
        named = zip(groups, grads, strict=True)
        self._sums = [(group, grad, FixedPointSum(grad)) for group, grad in named if grad.numel()]

    def take_sample(self) -> None:
        """Adds the gradients that one sample has left in the buffers."""
        for _, _, total in self._sums:
            total.take()

    def give(self) -> None:
        """Writes the sums into the buffers; empty sums are skipped, since kernels may have sums of their own."""
        for _, grad, total in self._sums:
            if not total.is_empty:
                grad.copy_(total.total().view_as(grad))

    def words(self) -> Iterator[tuple[str, SumWords]]:
        for group, _, total in self._sums:
            yield group, total.words()

    def forget(self) -> None:
        for _, _, total in self._sums:
            total.forget()
