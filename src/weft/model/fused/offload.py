"""Keeps what a backward needs in the machine's own memory while the GPU works on other layers.

Copies run on a stream of their own: out while the next layers run forward, back one layer before it is needed. On a
CPU there is nothing to move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from weft.kernels.device import Stream, current_stream, has_streams, on_stream
from weft.model.fused.layer import SavedForBackward


@dataclass(frozen=True)
class OffloadedLayer:
    """What a layer keeps, with the large tensors in the machine's own memory."""

    kept: SavedForBackward
    host: dict[str, torch.Tensor]
    device: dict[str, torch.Tensor]
    """On their way back."""

    def with_large(self, tensors: dict[str, torch.Tensor]) -> SavedForBackward:
        """What was kept, with these in the large ones' places."""
        kept: SavedForBackward = replace(self.kept, **tensors)  # type: ignore[arg-type]
        return kept


class Offload:
    """Moves what the layers of one microbatch keep to the machine's own memory and back."""

    def __init__(self, device: torch.device, names: Sequence[str]) -> None:
        """`names`: the fields of `Kept` that are moved."""
        self._names = names
        self._stream = Stream(device) if has_streams(device) else None

    def store(self, kept: SavedForBackward) -> OffloadedLayer:
        """Starts moving a layer's tensors out."""
        if self._stream is None:
            return OffloadedLayer(kept, {}, {})
        self._stream.wait_stream(current_stream(self._stream.device))
        host = {}
        with on_stream(self._stream):
            large = {name: getattr(kept, name) for name in self._names}
            for name, tensor in large.items():
                if tensor is None:
                    continue
                host[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                host[name].copy_(tensor, non_blocking=True)
                tensor.record_stream(self._stream)
        # What stands in for them is never read.
        stub = OffloadedLayer(kept, host, {}).with_large({name: torch.empty(0) for name in host})
        return OffloadedLayer(stub, host, {})

    def fetch(self, parked: OffloadedLayer, following: OffloadedLayer | None) -> SavedForBackward:
        """A layer's tensors back on the device; starts on those of the layer that comes after it."""
        if self._stream is None:
            return parked.kept
        self._start(parked)
        current = current_stream(self._stream.device)
        current.wait_stream(self._stream)
        for tensor in parked.device.values():
            tensor.record_stream(current)
        if following is not None:
            self._start(following)
        return parked.with_large(parked.device)

    def _start(self, parked: OffloadedLayer) -> None:
        assert self._stream is not None
        if parked.device:
            return
        with on_stream(self._stream):
            for name, tensor in parked.host.items():
                parked.device[name] = tensor.to(self._stream.device, non_blocking=True)
