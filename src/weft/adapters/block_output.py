"""The output of a decoder's attention or MLP block with slots, before it is normed or added to the residual stream.

The block stays where it is in the model. It is listened to by a forward hook, which exists only while an adapter sits
here: whoever has no such adapter pays nothing, and the fused path, which does not call the block, is not concerned.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from weft.adapters.method import SlotWeights
from weft.adapters.routing import Routing
from weft.adapters.row_place import RowSite


class BlockOutput(RowSite):
    """The output of one block."""

    def __init__(self, block: nn.Module, width: int, routing: Routing) -> None:
        """`width`: D, the features of the block's output."""
        super().__init__(width, routing)
        self._block = block
        self._hook: RemovableHandle | None = None

    def put(self, slot: int, weights: SlotWeights) -> None:
        """Lets an adapter sit here."""
        super().put(slot, weights)
        if self._hook is None:
            self._hook = self._block.register_forward_hook(self._heard)

    def free(self, slot: int) -> None:
        """Makes a slot free again, if an adapter sits on it."""
        super().free(slot)
        if self._hook is not None and not self.slots:
            self._hook.remove()
            self._hook = None

    def _heard(self, block: nn.Module, inputs: Any, output: Any) -> Any:
        """The block's output with every slot's adapter; attention returns its weights beside it."""
        if isinstance(output, tuple):
            return (self.adapted(output[0]), *output[1:])
        return self.adapted(output)
