"""A place where all rows pass unchanged and each job's own adapter changes its own rows.

It is a linear whose frozen product is the identity: x of a method's hooks is what passes, the y it changes starts as a
copy of it, and the dx it adds to starts as a copy of dy. Shape suffixes: T rows of the microbatch, D features of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from weft.adapters.method import SlotWeights
from weft.adapters.place_share import SiteShare
from weft.adapters.routing import Routing
from weft.adapters.slots import active_slots, apply_slots


class UnchangedRows:
    """The frozen map that changes nothing."""

    stored: ClassVar[Mapping[str, torch.Tensor]] = {}

    def product(self, x_TD: torch.Tensor, row_tile: int | None = None) -> torch.Tensor:
        """A copy of x."""
        return x_TD.clone()

    def input_gradient(self, dy_TO: torch.Tensor, row_tile: int | None = None) -> torch.Tensor:
        """A copy of dy."""
        return dy_TO.clone()


class RowSite:
    """Rows of one width that any number of adapters can change at once."""

    weight: torch.Tensor | None = None
    bias_O: torch.Tensor | None = None
    read_original: None = None

    def __init__(self, width: int, routing: Routing) -> None:
        """`width`: D, the features of a row."""
        self.width = width
        self.routing = routing
        self.share = SiteShare.whole(width, width)
        self.slots: dict[int, SlotWeights] = {}

    @property
    def in_features(self) -> int:
        """D."""
        return self.width

    @property
    def out_features(self) -> int:
        """D."""
        return self.width

    def put(self, slot: int, weights: SlotWeights) -> None:
        """Lets an adapter sit here."""
        self.slots[slot] = weights

    def free(self, slot: int) -> None:
        """Makes a slot free again, if an adapter sits on it."""
        self.slots.pop(slot, None)

    def adapted(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows (..., D) with every active slot's adapter; the same tensor where there is none."""
        active = active_slots(self.slots, self.routing)
        if not active:
            return rows
        # Autograd visits the slots even where the rows need no gradient.
        anchor = torch.zeros((), device=rows.device, requires_grad=True)
        changed_TD = apply_slots(rows.reshape(-1, self.width), anchor, UnchangedRows(), None, active, self.routing)
        return changed_TD.view(rows.shape)
