"""Backbones in this process of which a device keeps a slice; shared by several folders."""

from __future__ import annotations

import copy
from typing import Any

import torch

from benchmarks.pipeline.in_process import HostPeers
from weft.adapters.frozen import FrozenWeight
from weft.kernels.device import CPU
from weft.model.backbone import Backbone
from weft.model.divided import share_layers
from weft.model.shards import PendingGather


class Late(HostPeers):
    """Logs its calls; a layer is all noise until its gather is waited for."""

    def __init__(self, index: int = 0, count: int = 2) -> None:
        super().__init__(index, count, CPU)
        self.calls: list[str] = []

    def gather(self, layer: int, own: torch.Tensor, into: torch.Tensor) -> PendingGather:
        self.calls.append(f"start {layer}")
        into.fill_(255)
        return Waited(lambda: (self.calls.append(f"wait {layer}"), self._copy(layer, own, into)))


class Waited:
    def __init__(self, arrive: Any) -> None:
        self.wait = arrive


def spread(backbone: Backbone, count: int = 2, index: int = 0, peers: Late | None = None) -> Backbone:
    """The same, of which this device keeps a slice; all else lies in the machine's memory."""
    kept: dict[str, FrozenWeight] = {path: copy.deepcopy(linear.frozen) for path, linear in backbone.linears.items()}
    share_layers(backbone, peers or Late(index, count), kept.__getitem__)
    return backbone
