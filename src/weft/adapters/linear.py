"""A frozen linear with slots: y = x Wᵀ + b for all rows, and each job's own adapter on its own rows.

Products over rows run in blocks of a fixed size, so that a row's result does not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from weft.adapters.devices import Devices, sum_forward
from weft.adapters.frozen import Dense, FrozenWeight
from weft.adapters.frozen import tiled_mm as tiled_mm
from weft.adapters.method import SlotWeights
from weft.adapters.place_share import Side, SiteShare
from weft.adapters.routing import Routing
from weft.adapters.slots import active_slots, apply_slots


class SlotLinear(nn.Module):
    """A frozen `nn.Linear` that any number of adapters can sit on at once."""

    def __init__(self, linear: nn.Linear, routing: Routing, anchor: torch.Tensor) -> None:
        super().__init__()
        self.frozen: FrozenWeight = Dense.of(linear.weight.contiguous())
        """W, however it is stored; a loader may put a quantised one in its place."""
        own = linear.bias
        self.bias_O: nn.Parameter | None = None if own is None else nn.Parameter(own.detach(), requires_grad=False)
        self.share = SiteShare.whole(*self.frozen.shape)
        """What of the linear is on this device."""
        self._whole = self.frozen.shape
        self.routing = routing
        self.anchor = anchor
        """A scalar that requires grad: it makes autograd visit slots even where the input needs no gradient."""
        self.slots: dict[int, SlotWeights] = {}
        self.read_original: Callable[[], torch.Tensor] | None = None
        """Reads W (O, D) as it was before it was quantised; None where W is as it was."""
        self.elsewhere: Callable[[], FrozenWeight | None] | None = None
        """Where W comes and goes: reads it from elsewhere while it is not here, and gives None while it is."""

    @property
    def weight(self) -> torch.Tensor:
        """The frozen weight that is here, under the name transformers looks for."""
        return self.stored.dense()

    @property
    def stored(self) -> FrozenWeight:
        """W as it is stored, wherever it is now."""
        away = None if self.elsewhere is None else self.elsewhere()
        return self.frozen if away is None else away

    @property
    def in_features(self) -> int:
        """D of the whole linear."""
        return self._whole[1]

    @property
    def out_features(self) -> int:
        """O of the whole linear."""
        return self._whole[0]

    def divide(self, side: Side, devices: Devices) -> None:
        """Leaves only this device's part of the frozen weight here; to be called before adapters are made."""
        assert not self.slots, "whoever divides it does so first"
        self.share = SiteShare.part(*self._whole, side, devices)
        self.frozen = self.frozen.cut(self.share.outputs, self.share.inputs)
        if self.bias_O is not None:
            own_O = self.bias_O[self.share.outputs].clone()
            self.bias_O = nn.Parameter(own_O, requires_grad=False) if self.share.adds_once else None

    def put(self, slot: int, weights: SlotWeights) -> None:
        """Lets an adapter sit here."""
        self.slots[slot] = weights

    def free(self, slot: int) -> None:
        """Makes a slot free again, if an adapter sits on it."""
        self.slots.pop(slot, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """X (..., D) to (..., O); the leading dimensions together are the rows of the microbatch."""
        x_TD = x.reshape(-1, x.shape[-1])
        active = active_slots(self.slots, self.routing)
        anchor = self.anchor if active else self.anchor.detach()
        y_TO = apply_slots(x_TD, anchor, self.frozen, self.bias_O, active, self.routing)
        if self.share.devices is not None and not self.share.has_all_inputs:
            y_TO = sum_forward(y_TO, self.share.devices)
        return y_TO.view(*x.shape[:-1], -1)
