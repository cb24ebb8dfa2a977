"""The rows in front of a sample that hold no token of it, but virtual tokens of its job's adapter.

A sample of a job with virtual tokens runs with as many rows in front of it (`Sample.led_by`), which count as tokens
everywhere. What they hold is put there by the adapter: the embeddings of a prompt (`InputRows`), or in every layer the
keys and values that attention sees (`KeyValueRows`).

Shape suffixes: T rows of the microbatch, D width of the residual stream, K key and value heads, C size of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F

from weft.adapters.devices import Devices
from weft.adapters.method import SlotWeights
from weft.adapters.routing import Routing
from weft.adapters.row_place import RowSite
from weft.adapters.slots import active_slots


class InputRows(RowSite):
    """What the first layer sees."""

    def __init__(
        self,
        width: int,
        routing: Routing,
        embed: Callable[[torch.Tensor], torch.Tensor],
        tokens: Callable[[str], list[int]],
    ) -> None:
        """`embed`: the backbone's embeddings of token ids; `tokens`: the ids of a text."""
        super().__init__(width, routing)
        self.embed = embed
        self.tokens = tokens


class KeyValueRows(RowSite):
    """Keys and values of one layer's attention, side by side; positions are rotated into the keys already."""

    def __init__(self, layer: int, width: int, routing: Routing) -> None:
        """`width`: of keys and values together."""
        super().__init__(width, routing)
        self._layer = layer
        self._num_heads = 0
        """Where they are divided, of all devices together."""
        self._heads = (0, 0)
        """That other devices have, before those here and behind them."""

    def divide(self, num_heads: int, devices: Devices) -> None:
        """Lets attention have this device's run of so many heads; to be called before adapters are made."""
        self._num_heads, size = num_heads, num_heads // devices.count
        self._heads = devices.index * size, (devices.count - 1 - devices.index) * size
        self.share = replace(self.share, devices=devices)

    def columns_here(self, device: torch.device) -> torch.Tensor | None:
        """The numbers of a row that belong to this device's heads, keys before values; None: all."""
        before, behind = self._heads
        if not before and not behind:
            return None
        numbers_2KC = torch.arange(self.width, device=device).view(2, self._num_heads, -1)
        return numbers_2KC[:, before : self._num_heads - behind].flatten()

    def put(self, slot: int, weights: SlotWeights) -> None:
        """Lets an adapter sit here."""
        super().put(slot, weights)
        self.routing.prefixes[self._layer] = self._adapted_pair

    def free(self, slot: int) -> None:
        """Makes a slot free again, if an adapter sits on it."""
        super().free(slot)
        if not self.slots:
            self.routing.prefixes.pop(self._layer, None)

    def _adapted_pair(self, key_1KTC: torch.Tensor, value_1KTC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both with every active slot's adapter."""
        if not active_slots(self.slots, self.routing):
            return key_1KTC, value_1KTC
        before, behind = self._heads
        # Adapters see all heads; those that are elsewhere are zero, and so are their gradients.
        key_1KTC, value_1KTC = (F.pad(x, (0, 0, 0, 0, before, behind)) for x in (key_1KTC, value_1KTC))
        pair = [x[0].transpose(0, 1).flatten(1) for x in (key_1KTC, value_1KTC)]
        parts = self.adapted(torch.cat(pair, dim=1)).split([x.shape[1] for x in pair], dim=1)
        key, value = (
            part.unflatten(1, (x.shape[1], x.shape[3])).transpose(0, 1)[None, before : x.shape[1] - behind]
            for part, x in zip(parts, (key_1KTC, value_1KTC), strict=True)
        )
        return key, value
