"""The output of a decoder's attention or MLP block with slots, before it is normed or added to the residual stream.

All rows pass unchanged, and each job's own adapter changes its own rows: the place is a linear whose frozen product is
the identity. So x of a method's hooks is the block's output y, the y it changes starts as a copy of it, and the dx it
adds to starts as a copy of dy.

The block stays where it is in the model. It is listened to by a forward hook, which exists only while an adapter sits
here: whoever has no such adapter pays nothing, and the fused path, which does not call the block, is not concerned.

Shape suffixes: T rows of the microbatch, D width of the residual stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from weft.adapters.method import SlotWeights
from weft.adapters.routing import Routing
from weft.adapters.slots import active_slots, run_slots


class Unchanged:
    """The frozen map that changes nothing."""

    stored: ClassVar[Mapping[str, torch.Tensor]] = {}

    def product(self, x_TD: torch.Tensor, row_tile: int | None = None) -> torch.Tensor:
        """A copy of x."""
        return x_TD.clone()

    def input_gradient(self, dy_TO: torch.Tensor, row_tile: int | None = None) -> torch.Tensor:
        """A copy of dy."""
        return dy_TO.clone()


class BlockOutput:
    """The output of one block, which any number of adapters can sit on at once."""

    def __init__(self, block: nn.Module, width: int, routing: Routing) -> None:
        """`width`: D, the features of the block's output."""
        self.width = width
        self.routing = routing
        self.bias_O: torch.Tensor | None = None
        self.slots: dict[int, SlotWeights] = {}
        self._block = block
        self._hook: RemovableHandle | None = None

    @property
    def in_features(self) -> int:
        """D."""
        return self.width

    @property
    def out_features(self) -> int:
        """D."""
        return self.width

    @property
    def weight(self) -> None:
        """There is none."""
        return None

    def put(self, slot: int, weights: SlotWeights) -> None:
        """Lets an adapter sit here."""
        self.slots[slot] = weights
        if self._hook is None:
            self._hook = self._block.register_forward_hook(self._adapted)

    def free(self, slot: int) -> None:
        """Makes a slot free again, if an adapter sits on it."""
        self.slots.pop(slot, None)
        if self._hook is not None and not self.slots:
            self._hook.remove()
            self._hook = None

    def _adapted(self, block: nn.Module, inputs: Any, output: Any) -> Any:
        """The block's output with every slot's adapter; attention returns its weights beside it."""
        if isinstance(output, tuple):
            return (self._changed(output[0]), *output[1:])
        return self._changed(output)

    def _changed(self, y: torch.Tensor) -> torch.Tensor:
        active = active_slots(self.slots, self.routing)
        if not active:
            return y
        # Autograd visits the slots even where the block's output needs no gradient.
        anchor = torch.zeros((), device=y.device, requires_grad=True)
        return run_slots(y.reshape(-1, self.width), anchor, Unchanged(), None, active, self.routing).view(y.shape)
