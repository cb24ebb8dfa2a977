"""The sites of a backbone, where any number of adapters sit at once, each on its own job's rows.

`SlotLinear` is a frozen linear, y = x Wᵀ + b for all rows; its products run in blocks of a fixed number of rows, so
that a row's result does not depend on its neighbours. A `RowSite` is a linear whose frozen product is the identity: a
method's hooks see the passing rows as x, a copy of them as y, and a copy of dy as dx. `BlockOutput` is the output of a
decoder's attention or MLP block before it is normed or added to the residual stream. `InputRows` and `KeyValueRows` are
the rows of virtual tokens in front of a sample (`Sample.led_by`), which count as tokens everywhere: the embeddings of a
prompt, or in every layer the keys and values that attention sees.

Shape suffixes: T rows of the microbatch, D in or width, O out, K key and value heads, C size of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.hooks import RemovableHandle

from weft.adapters.devices import Devices, Side, SiteShare, sum_forward
from weft.adapters.frozen import Dense, FrozenWeight
from weft.adapters.frozen import tiled_mm as tiled_mm
from weft.adapters.method import LinearShape, SlotHolder, SlotWeights
from weft.adapters.routing import Routing
from weft.adapters.slots import active_slots, apply_slots
from weft.kernels.lora.tables import Site

_LINEAR = ("Linear", "FalconLinear")
_TRANSPOSED = ("Conv1D",)
"""Linears of GPT-2, whose weight is stored as (in, out)."""


def linear_modules(model: Any) -> dict[str, nn.Linear]:
    """Every linear of a transformers model except its output head, by path. A linear whose weight is stored transposed
    is returned as an `nn.Linear` whose weight is a view of it: writing to the view writes to the model."""
    head = model.get_output_embeddings()
    found = {path: _as_linear(module) for path, module in model.named_modules() if module is not head}
    return {path: linear for path, linear in found.items() if linear is not None}


def _as_linear(module: nn.Module) -> nn.Linear | None:
    kind = type(module).__name__
    if kind in _LINEAR:
        assert isinstance(module, nn.Linear)
        return module
    if kind not in _TRANSPOSED:
        return None
    weight_DO, bias_O = module.get_parameter("weight"), module.get_parameter("bias")
    linear = nn.Linear(weight_DO.shape[0], weight_DO.shape[1], device="meta")
    linear.weight = nn.Parameter(weight_DO.detach().t(), requires_grad=False)
    linear.bias = nn.Parameter(bias_O.detach(), requires_grad=False)
    return linear


class SlotLinear(nn.Module, SlotHolder):
    """A frozen `nn.Linear` that holds any number of adapters at once."""

    def __init__(self, linear: nn.Linear, routing: Routing, anchor: torch.Tensor) -> None:
        super().__init__()
        self.frozen: FrozenWeight = Dense.of(linear.weight.contiguous())
        """The weight W in its storage format; a loader may replace it by a quantised one."""
        own = linear.bias
        self.bias_O: nn.Parameter | None = None if own is None else nn.Parameter(own.detach(), requires_grad=False)
        self.share = SiteShare.whole(*self.frozen.shape)
        self.out_features, self.in_features = self.frozen.shape
        self.routing = routing
        self.anchor = anchor
        """A scalar that requires grad, so that autograd visits slots even where the input needs no gradient."""
        self.slots: dict[int, SlotWeights] = {}
        self.kernel_site: Site | None = None
        """Its number in the tables of `slots.py`, if kernels can run LoRA here."""
        self.read_original: Callable[[], torch.Tensor] | None = None
        """Reads the original W (O, D) of a quantised weight; None if W is not quantised."""
        self.elsewhere: Callable[[], FrozenWeight | None] | None = None
        """Reads a W that is stored elsewhere; returns None while W is here."""

    @property
    def shape(self) -> LinearShape:
        return self.out_features, self.in_features

    @property
    def weight(self) -> torch.Tensor:
        return self.stored.dense()

    @property
    def stored(self) -> FrozenWeight:
        away = None if self.elsewhere is None else self.elsewhere()
        return self.frozen if away is None else away

    def divide(self, side: Side, devices: Devices) -> None:
        """Keeps only this device's part of the frozen weight; called before adapters are made."""
        assert not self.slots, "a linear is divided before it has adapters"
        self.share = SiteShare.part(self.out_features, self.in_features, side, devices)
        self.frozen = self.frozen.cut(self.share.outputs, self.share.inputs)
        if self.bias_O is not None:
            own_O = self.bias_O[self.share.outputs].clone()
            self.bias_O = nn.Parameter(own_O, requires_grad=False) if self.share.adds_once else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """X (..., D) to (..., O); all leading dimensions together are the rows of the microbatch."""
        x_TD = x.reshape(-1, x.shape[-1])
        by_kernels = None if self.kernel_site is None else self.routing.by_kernels
        kernels = None if by_kernels is None or self.kernel_site is None else by_kernels.at(self.kernel_site)
        active = active_slots(self.slots, self.routing, () if by_kernels is None else by_kernels.slots)
        anchor = self.anchor if active or kernels else self.anchor.detach()
        y_TO = apply_slots(x_TD, anchor, self.frozen, self.bias_O, active, self.routing, kernels)
        if self.share.devices is not None and not self.share.has_all_inputs:
            y_TO = sum_forward(y_TO, self.share.devices)
        return y_TO.view(*x.shape[:-1], -1)


class UnchangedRows:
    """The frozen product of a site that has no weight: it returns its rows unchanged."""

    stored: ClassVar[Mapping[str, torch.Tensor]] = {}

    def product(self, x_TD: torch.Tensor, row_tile: int | None = None) -> torch.Tensor:
        return x_TD.clone()

    def input_gradient(self, dy_TO: torch.Tensor, row_tile: int | None = None) -> torch.Tensor:
        return dy_TO.clone()


class RowSite(SlotHolder):
    weight: torch.Tensor | None = None
    bias_O: torch.Tensor | None = None
    read_original: None = None

    def __init__(self, width: int, routing: Routing) -> None:
        self.width = self.in_features = self.out_features = width
        self.routing = routing
        self.share = SiteShare.whole(width, width)
        self.slots: dict[int, SlotWeights] = {}

    @property
    def shape(self) -> LinearShape:
        return self.width, self.width

    def adapted(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows (..., D) with the adapters of all active slots; the same tensor if there is none."""
        active = active_slots(self.slots, self.routing)
        if not active:
            return rows
        # Autograd visits the slots even where the rows need no gradient.
        anchor = torch.zeros((), device=rows.device, requires_grad=True)
        changed_TD = apply_slots(rows.reshape(-1, self.width), anchor, UnchangedRows(), None, active, self.routing)
        return changed_TD.view(rows.shape)


class BlockOutput(RowSite):
    def __init__(self, block: nn.Module, width: int, routing: Routing) -> None:
        super().__init__(width, routing)
        self._block = block
        self._hook: RemovableHandle | None = None

    def put(self, slot: int, weights: SlotWeights) -> None:
        super().put(slot, weights)
        if self._hook is None:
            self._hook = self._block.register_forward_hook(self._adapted_output)

    def free(self, slot: int) -> None:
        super().free(slot)
        if self._hook is not None and not self.slots:
            self._hook.remove()
            self._hook = None

    def _adapted_output(self, block: nn.Module, inputs: Any, output: Any) -> Any:
        """The block's output with the adapters of all slots; attention returns its weights as well."""
        if isinstance(output, tuple):
            return (self.adapted(output[0]), *output[1:])
        return self.adapted(output)


class InputRows(RowSite):
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
    """Keys and values of one layer's attention, concatenated; keys are rotated already."""

    def __init__(self, layer: int, width: int, routing: Routing) -> None:
        super().__init__(width, routing)
        self._layer = layer
        self._num_heads = 0
        self._heads = (0, 0)
        """Number of heads on other devices: those before the heads on this device, and those after them."""

    def divide(self, num_heads: int, devices: Devices) -> None:
        """Limits attention to this device's share of the heads; called before adapters are made."""
        self._num_heads, size = num_heads, num_heads // devices.count
        self._heads = devices.index * size, (devices.count - 1 - devices.index) * size
        self.share = replace(self.share, devices=devices)

    def columns_here(self, device: torch.device) -> torch.Tensor | None:
        """Columns of a row that belong to this device's heads, keys before values; None: all."""
        before, behind = self._heads
        if not before and not behind:
            return None
        numbers_2KC = torch.arange(self.width, device=device).view(2, self._num_heads, -1)
        return numbers_2KC[:, before : self._num_heads - behind].flatten()

    def put(self, slot: int, weights: SlotWeights) -> None:
        super().put(slot, weights)
        self.routing.prefixes[self._layer] = self._adapted_pair

    def free(self, slot: int) -> None:
        super().free(slot)
        if not self.slots:
            self.routing.prefixes.pop(self._layer, None)

    def _adapted_pair(self, key_1KTC: torch.Tensor, value_1KTC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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
