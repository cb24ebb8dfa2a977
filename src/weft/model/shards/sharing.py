"""Spreads the frozen weights of a backbone's layers over devices.

What is spread are the weights of the layers' linears. Each device has the rest whole: norms and biases are small, a
microbatch looks up few rows of the embedding, and the output head would make a buffer as large as itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from weft.adapters.frozen import FrozenWeight, join
from weft.model.backbone import Backbone
from weft.model.fused.path import FusedPath
from weft.model.shards.flat_layer import FlatLayer, LayerWeight
from weft.model.shards.peers import Peers
from weft.model.shards.ring import LayerRing


def share_layers(backbone: Backbone, peers: Peers, read: Callable[[str], FrozenWeight]) -> None:
    """Keeps one slice of every layer, and lets microbatches gather the others as they come to it.

    `read` gives the weight of a linear by its path, stored as the backbone stores it, now and whenever somebody asks
    for one that is not here. What the backbone itself has of these weights is not read, so that they may have shapes
    and no numbers: then no more than one layer is ever here at once.
    """
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
    """The weights of every layer's linears, joined where a path has joined them."""
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
