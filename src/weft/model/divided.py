"""Divides a backbone over devices: its stored weights (`share_layers`), or every layer's work (tensor parallel).

Shared layers: each device keeps a slice of the weights of the layers' linears, and gathers the others as it needs them.
Each has the rest whole: norms and biases are small, a microbatch looks up few rows of the embedding, and the output
head would make a buffer as large as itself.

Tensor parallel, on either path:

| linears | divided by | sum over devices |
|---|---|---|
| q, k, v; gate, up | outputs; q, k and v by whole heads | gradient of the block's input, once |
| attention's output; down | inputs | result |

The embedding, norms, output head and loss are whole on every device, which all find the same there. Adapters are whole
too, and compute with the part of their parameters that belongs to a device's part of the weight
(`adapters/devices.py`); at a job's step their gradients are added up. What a device computes depends on how many there
are, and so do bits."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from weft.adapters.devices import Devices, Side, sum_backward
from weft.adapters.frozen import FP8_MULTIPLE, FrozenWeight, join
from weft.adapters.method import Attachment
from weft.adapters.sites import KeyValueRows, SlotLinear
from weft.kernels.storage import GROUP
from weft.model.backbone import Backbone
from weft.model.fused.model import SIDES
from weft.model.fused.path import FusedPath
from weft.model.shards import FlatLayer, LayerRing, LayerWeight, Peers
from weft.plan.decoder import SEPARATE, Config, DecoderSizes
from weft.plan.families import FAMILIES, describe, final_norm, takes_tensor


def share_layers(backbone: Backbone, peers: Peers, read: Callable[[str], FrozenWeight]) -> None:
    """Keeps one slice of every layer, and lets microbatches gather the others when they reach the layer. `read` returns
    the weight of a linear by its path, as the backbone stores it, now and later for weights that are not here. The
    backbone's own weights are not read, so they may be empty: then at most one layer is ever here at once."""
    layers = [FlatLayer(weights) for weights in _layer_weights(backbone)]
    slices = []
    for index, layer in enumerate(layers):
        whole = torch.zeros(layer.padded_bytes(peers.count), dtype=torch.uint8, device=backbone.device)
        layer.write([_joined(own, read) for own in layer.weights], whole)
        slices.append(peers.keep(index, whole))
        del whole
    ring = LayerRing(layers, slices, peers)
    for index, layer in enumerate(layers):
        for path in (path for own in layer.weights for path in own.paths):
            linear = backbone.linears[path]
            linear.elsewhere = lambda index=index, path=path: None if ring.holds(index) else read(path)
    backbone.gather_by(ring)


def _joined(own: LayerWeight, read: Callable[[str], FrozenWeight]) -> FrozenWeight:
    found = [read(path) for path in own.paths]
    return found[0] if len(found) == 1 else join(found)


def _layer_weights(backbone: Backbone) -> list[list[LayerWeight]]:
    linears = backbone.linears
    paths: dict[int, list[str]] = {}
    for path in linears:
        found = re.search(r"\.layers\.(\d+)\.", path)
        assert found is not None, "all linears but the output head are in layers"
        paths.setdefault(int(found[1]), []).append(path)
    if not isinstance(backbone.path, FusedPath):
        return [[LayerWeight(linears[path].frozen, (path,)) for path in own] for own in paths.values()]
    named, layers = list(linears), []
    for layer in backbone.path.model.layers:
        weights = []
        for product in (layer.qkv, layer.out, layer.gate_up, layer.down):
            own = tuple(named[product.site.module :][: len(product.site.sizes)])
            parts = tuple(linears[path].frozen for path in own) if len(own) > 1 else ()
            weights.append(LayerWeight(product.weight, own, parts))
        layers.append(weights)
    return layers


_SIDES: dict[str, Side] = {
    path.rpartition(".")[2]: side for site, side in zip(SEPARATE, SIDES.values(), strict=True) for path in site
}


def why_not_divisible(config: Config, count: int, quantize: str = "none") -> str | None:
    """Why the layers of a model, stored like this, cannot be divided over this many devices; None if they can."""
    kind = str(config.get("model_type", ""))
    known = [family for family in FAMILIES if family not in ("phi3", "olmo3", "granitemoehybrid")]
    if not takes_tensor(config):
        others = "" if final_norm(config) is None else "; stages:N and shards:N take this one"
        found = f"is a {kind} model, whose layers cannot be divided; tensor parallel is for {', '.join(known)}"
        return found + others
    sizes = describe(config).sizes
    for number, what in ((sizes.num_heads, "heads"), (sizes.num_kv_heads, "key and value heads"), (sizes.ffn, "rows")):
        if number % count:
            fit = ", ".join(str(n) for n in _fitting(sizes))
            return f"has {number} {what}, which {count} devices cannot share evenly; tensor may be {fit}"
    return _why_not_divisible(sizes, count, quantize)


def _why_not_divisible(sizes: DecoderSizes, count: int, quantize: str) -> str | None:
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
    shared = (sizes.num_heads, sizes.num_kv_heads, sizes.ffn)
    return [n for n in range(1, sizes.num_kv_heads + 1) if all(number % n == 0 for number in shared)]


def divide(backbone: Backbone, devices: Devices, store: Callable[[SlotLinear], None] = lambda linear: None) -> None:
    """Keeps only this device's part of every layer; called before kernels are chosen and adapters are made. `store`:
    applied to each linear before it is divided."""
    assert why_not_divisible(backbone.model.config.to_dict(), devices.count) is None, (
        "checked before anything was loaded"
    )
    for path, linear in backbone.linears.items():
        store(linear)
        linear.divide(_SIDES[path.rpartition(".")[2]], devices)
    num_heads = describe(backbone.model.config.to_dict()).sizes.num_kv_heads
    for site in backbone.sites.of(Attachment.KEYS_AND_VALUES).values():
        assert isinstance(site, KeyValueRows)
        site.divide(num_heads, devices)
    modules = dict(backbone.model.named_modules())
    for path in backbone.sites.of(Attachment.BLOCK_OUTPUT):
        _sum_input_gradient(modules[path], devices)
    backbone.devices = devices


def _sum_input_gradient(block: nn.Module, devices: Devices) -> None:

    def read(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if given:
            return (sum_backward(given[0], devices), *given[1:]), named
        return given, {**named, "hidden_states": sum_backward(named["hidden_states"], devices)}

    block.register_forward_pre_hook(read, with_kwargs=True)
