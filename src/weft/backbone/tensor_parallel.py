"""Divides every layer of a backbone over devices: tensor parallel on the reference path.

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

from typing import Any

from torch import nn

from weft.adapters.devices import Devices, sum_backward
from weft.adapters.leading_rows import KeyValueRows
from weft.adapters.method import Attachment
from weft.adapters.place_share import Side
from weft.backbone.backbone import Backbone
from weft.families.description import Config, DecoderSizes
from weft.families.layer_form import SEPARATE
from weft.families.registry import FAMILIES, describe

_SIDES: dict[str, Side] = dict(
    zip(
        (path.rpartition(".")[2] for site in SEPARATE for path in site),
        ("outputs", "outputs", "outputs", "inputs", "outputs", "outputs", "inputs"),
        strict=True,
    )
)
"""By what the linears of a layer are divided."""


def why_undivided(config: Config, count: int) -> str | None:
    """Why the layers of a model cannot be divided over so many devices; None if they can."""
    kind = str(config.get("model_type", ""))
    known = [family for family in FAMILIES if family != "phi3"]
    if kind not in FAMILIES or describe(config).sizes.form.sites != SEPARATE:
        return f"is a {kind} model, whose layers nobody has divided; tensor parallel is for those of {', '.join(known)}"
    sizes = describe(config).sizes
    for number, what in ((sizes.num_heads, "heads"), (sizes.num_kv_heads, "key and value heads"), (sizes.ffn, "rows")):
        if number % count:
            fit = ", ".join(str(n) for n in _fitting(sizes))
            return f"has {number} {what}, which {count} devices cannot share evenly; tensor may be {fit}"
    return None


def _fitting(sizes: DecoderSizes) -> list[int]:
    """All numbers of devices that share everything evenly."""
    shared = (sizes.num_heads, sizes.num_kv_heads, sizes.ffn)
    return [n for n in range(1, sizes.num_kv_heads + 1) if all(number % n == 0 for number in shared)]


def divide(backbone: Backbone, devices: Devices) -> None:
    """Leaves on this device its part of every layer; to be called before adapters are made."""
    assert why_undivided(backbone.model.config.to_dict(), devices.count) is None, "checked before anything was loaded"
    for path, linear in backbone.linears.items():
        linear.divide(_SIDES[path.rpartition(".")[2]], devices)
    num_heads = describe(backbone.model.config.to_dict()).sizes.num_kv_heads
    for place in backbone.places(Attachment.KEYS_AND_VALUES).values():
        assert isinstance(place, KeyValueRows)
        place.divide(num_heads, devices)
    modules = dict(backbone.model.named_modules())
    for path in backbone.blocks:
        _meet_behind(modules[path], devices)
    backbone.devices = devices


def _meet_behind(block: nn.Module, devices: Devices) -> None:
    """Lets the gradient of what a block reads be added up."""

    def read(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if given:
            return (sum_backward(given[0], devices), *given[1:]), named
        return given, {**named, "hidden_states": sum_backward(named["hidden_states"], devices)}

    block.register_forward_pre_hook(read, with_kwargs=True)
