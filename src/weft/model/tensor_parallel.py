"""Divides every layer of a backbone over devices: tensor parallel, on either path.

| linears | divided by | where the devices meet |
|---|---|---|
| q, k, v; gate, up | outputs; q, k and v by whole heads | the gradient of what a block reads is added up, once |
| attention's output; down | inputs | the result is added up |

The embedding, norms, output head and loss are whole on every device, which all find the same there. Adapters are whole
too, and compute with the part of their parameters that belongs to a device's part of the weight
(`adapters/place_share.py`); at a job's step their gradients are added up. What a device computes depends on how many
there are, and so do bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from weft.adapters.devices import Devices, sum_backward
from weft.adapters.frozen import FP8_MULTIPLE
from weft.adapters.leading_rows import KeyValueRows
from weft.adapters.linear import SlotLinear
from weft.adapters.method import Attachment
from weft.adapters.place_share import Side
from weft.kernels.storage.nf4 import GROUP
from weft.model.backbone import Backbone
from weft.model.fused.model import SIDES
from weft.plan.families.description import Config, DecoderSizes
from weft.plan.families.layer_form import SEPARATE
from weft.plan.families.registry import FAMILIES, describe

_SIDES: dict[str, Side] = {
    path.rpartition(".")[2]: side for site, side in zip(SEPARATE, SIDES.values(), strict=True) for path in site
}
"""By what the linears of a layer are divided."""


def why_not_divisible(config: Config, count: int, quantize: str = "none") -> str | None:
    """Why the layers of a model, stored like that, cannot be divided over so many devices; None if they can."""
    kind = str(config.get("model_type", ""))
    known = [family for family in FAMILIES if family != "phi3"]
    if kind not in FAMILIES or describe(config).sizes.form.sites != SEPARATE:
        return f"is a {kind} model, whose layers nobody has divided; tensor parallel is for those of {', '.join(known)}"
    sizes = describe(config).sizes
    for number, what in ((sizes.num_heads, "heads"), (sizes.num_kv_heads, "key and value heads"), (sizes.ffn, "rows")):
        if number % count:
            fit = ", ".join(str(n) for n in _fitting(sizes))
            return f"has {number} {what}, which {count} devices cannot share evenly; tensor may be {fit}"
    return _why_not_divisible(sizes, count, quantize)


def _why_not_divisible(sizes: DecoderSizes, count: int, quantize: str) -> str | None:
    """Why weights that are stored like that cannot be cut into so many parts."""
    heads, kv_heads = sizes.num_heads * sizes.head_size, sizes.num_kv_heads * sizes.head_size
    cut, multiple = {heads, sizes.ffn}, 1
    if quantize == "nf4":
        multiple = GROUP  # numbers along inputs that share a scale
    elif quantize == "fp8":
        # What fits no FP8 product stays dense, and can be cut anywhere.
        cut, multiple = {n for n in (*cut, kv_heads) if n % FP8_MULTIPLE == 0}, FP8_MULTIPLE
    for number in sorted(cut):
        if number // count % multiple:
            found = f"has weights of {number} inputs or outputs, of which {quantize} keeps {multiple} together"
            return f"{found}, so {count} devices cannot share them; use fewer, or another quantize"
    return None


def _fitting(sizes: DecoderSizes) -> list[int]:
    """All numbers of devices that share everything evenly."""
    shared = (sizes.num_heads, sizes.num_kv_heads, sizes.ffn)
    return [n for n in range(1, sizes.num_kv_heads + 1) if all(number % n == 0 for number in shared)]


def divide(backbone: Backbone, devices: Devices, store: Callable[[SlotLinear], None] = lambda linear: None) -> None:
    """Leaves on this device its part of every layer; to be called before kernels are chosen and adapters are made.

    `store`: what is done with each linear before it is divided.
    """
    assert why_not_divisible(backbone.model.config.to_dict(), devices.count) is None, (
        "checked before anything was loaded"
    )
    for path, linear in backbone.linears.items():
        store(linear)
        linear.divide(_SIDES[path.rpartition(".")[2]], devices)
    num_heads = describe(backbone.model.config.to_dict()).sizes.num_kv_heads
    for place in backbone.places(Attachment.KEYS_AND_VALUES).values():
        assert isinstance(place, KeyValueRows)
        place.divide(num_heads, devices)
    modules = dict(backbone.model.named_modules())
    for path in backbone.blocks:
        _sum_input_gradient(modules[path], devices)
    backbone.devices = devices


def _sum_input_gradient(block: nn.Module, devices: Devices) -> None:
    """Lets the gradient of what a block reads be added up."""

    def read(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if given:
            return (sum_backward(given[0], devices), *given[1:]), named
        return given, {**named, "hidden_states": sum_backward(named["hidden_states"], devices)}

    block.register_forward_pre_hook(read, with_kwargs=True)
