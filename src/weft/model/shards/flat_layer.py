"""A layer's frozen weights as one run of bytes, however they are stored: what devices cut into slices and gather.

Bytes are bytes: FP8, int8 and NF4 weights are gathered in their small form, and no number changes on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from weft.adapters.frozen import FrozenWeight

ALIGNMENT = 256
"""Bytes. Every tensor begins at a multiple, as one of its own would, so that libraries take the same way through it."""


@dataclass(frozen=True, eq=False)
class LayerWeight:
    """A frozen weight of a layer that has a storage of its own."""

    weight: FrozenWeight
    paths: tuple[str, ...]
    """The linears whose outputs it has, in order."""
    parts: tuple[FrozenWeight, ...] = ()
    """Weights of these linears that share its storage, where several are joined to one."""


class FlatLayer:
    """Where in a run of bytes the frozen weights of one layer lie."""

    def __init__(self, weights: Sequence[LayerWeight]) -> None:
        self.weights = tuple(weights)
        self._starts: dict[tuple[int, str], int] = {}
        """Of every stored tensor: the place of its weight and its name."""
        end = 0
        for place, own in enumerate(weights):
            for name, tensor in own.weight.stored.items():
                assert tensor.is_contiguous(), "a weight with a storage of its own is in one piece"
                self._starts[place, name] = end
                end += _rounded_up(tensor.numel() * tensor.element_size(), ALIGNMENT)
        self.num_bytes = end

    def padded_bytes(self, num_slices: int) -> int:
        """Bytes that can be cut into so many equal slices."""
        return _rounded_up(self.num_bytes, num_slices * ALIGNMENT)

    def write(self, numbers: Sequence[FrozenWeight], into: torch.Tensor) -> None:
        """Puts numbers into a run of bytes: weights like those of this layer, which may have none themselves."""
        for place, (own, given) in enumerate(zip(self.weights, numbers, strict=True)):
            for name, tensor in own.weight.stored.items():
                start, found = self._starts[place, name], given.stored[name]
                assert found.shape == tensor.shape and found.dtype == tensor.dtype
                flat = found.detach().contiguous().view(-1).view(torch.uint8)
                into[start : start + len(flat)].copy_(flat)

    def lie_in(self, buffer: torch.Tensor) -> None:
        """Lets the weights read a run of bytes from now on, whatever will be written there."""
        for place, own in enumerate(self.weights):
            for name, whole in own.weight.stored.items():
                start = self._starts[place, name]
                there = buffer[start : start + whole.numel() * whole.element_size()].view(whole.dtype)
                before = whole.storage_offset()
                for weight in (*own.parts, own.weight):
                    tensor = weight.stored[name]
                    first = there.storage_offset() + tensor.storage_offset() - before
                    # Autograd is not to count what is written there: whose turn it is, the ring sees to.
                    view = there.as_strided(tensor.shape, tensor.stride(), first).data
                    weight.register_parameter(name, nn.Parameter(view, requires_grad=False))


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
