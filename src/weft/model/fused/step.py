"""The fused step: a whole microbatch forward and back, adding to every adapter's gradients.

For a part of a model the residual stream enters and leaves with everything added, and so does its gradient the other
way: one tensor crosses a cut, and each layer sees the numbers it would see in one piece.

What a backward needs can wait in the machine's memory while the GPU works on other layers. Copies run on a stream of
their own: out while the next layers run forward, back one layer before it is needed. On a CPU nothing is moved.

The same lines run on a GPU over Triton kernels and on a CPU over their reference implementations. Shape suffixes: T
rows, D hidden size, F rotary frequencies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

from weft.kernels.device import Stream, current_stream, has_streams, on_stream
from weft.kernels.layers.rms_norm import add, add_norm, norm_grad
from weft.kernels.lora.tables import SlotTable
from weft.model.fused.inputs import Inputs
from weft.model.fused.layer import (
    Context,
    KeyCache,
    ResidualGrad,
    ResidualStream,
    SavedForBackward,
    added,
    backward,
    forward,
)
from weft.model.fused.model import FusedModel
from weft.model.path import Memory


@dataclass
class Passed:
    context: Context
    left_TD: torch.Tensor
    """Output after the last norm, or the input of the next part of the model."""
    last_TD: torch.Tensor
    y_TD: torch.Tensor | None = None
    kept: list[SavedForBackward] = field(default_factory=list)
    """Kept tensors layer by layer; with `offload` they are in `parked` instead."""
    parked: list[OffloadedLayer] = field(default_factory=list)
    offload: Offload | None = None

    def take_last(self) -> SavedForBackward:
        """Kept tensors of the last layer; their memory is free as soon as that layer is done."""
        if self.offload is None:
            return self.kept.pop()
        last = self.parked.pop()
        return self.offload.fetch(last, self.parked[-1] if self.parked else None)


@torch.no_grad()
def run_forward(
    model: FusedModel,
    inputs: Inputs,
    table: SlotTable,
    row_tile: int | None,
    memory: Memory,
    entering_TD: torch.Tensor | None = None,
    *,
    needs_grad: bool,
    cache: KeyCache | None = None,
) -> Passed:
    """The hidden states of a microbatch and, with `needs_grad`, the state for its backward. `entering_TD`: from the
    part before."""
    turns = tuple(rotary.turns(inputs.part("positions"), model.dtype) for rotary in model.rotaries)
    context = Context(model, inputs, table, turns, row_tile, memory.recompute, needs_grad, cache)
    stream = ResidualStream(_embedded(context) if entering_TD is None else entering_TD)
    offload = Offload(stream.x_TD.device, model.moved) if memory.offload and needs_grad else None
    kept: list[SavedForBackward] = []
    parked: list[OffloadedLayer] = []
    if model.ring is not None:
        model.ring.begin(back=False)
    for index, layer in enumerate(model.layers):
        if model.ring is not None:
            model.ring.use(index)
        stream, saved = forward(layer, stream, context)
        if offload is not None:
            parked.append(offload.store(saved))
        elif needs_grad:
            kept.append(saved)
    if model.ring is not None:
        model.ring.end(then_back=needs_grad)
    assert stream.y_TD is not None
    y_TD = stream.y_TD if model.post is not None and needs_grad else None
    if model.norm is None:
        last_TD = left_TD = add(stream.x_TD, stream.y_TD, model.post)
    else:
        last_TD, left_TD = add_norm(stream.x_TD, stream.y_TD, model.norm, model.post)
    return Passed(context, left_TD, last_TD, y_TD, kept, parked, offload)


def _embedded(context: Context) -> torch.Tensor:
    model, ids = context.model, context.inputs.part("ids")
    assert model.embedding_VD is not None, "a later part of a model goes on with what entered"
    embedded_TD = F.embedding(ids, model.embedding_VD)
    if model.embedding_scale is not None:
        embedded_TD *= model.embedding_scale
    context.changes.put_rows("input", model.input_rows, embedded_TD)
    return embedded_TD if model.input_scale is None else embedded_TD.mul_(model.input_scale)


@torch.no_grad()
def run_backward(passed: Passed, grad_TD: torch.Tensor) -> torch.Tensor | None:
    """Runs from the gradient of the output back to the first layer here; adds to every adapter's gradients. Returns the
    gradient of the input; None for embeddings."""
    model = passed.context.model
    grad = _last_grad(passed, grad_TD)
    passed.y_TD = None
    if model.ring is not None:
        model.ring.begin(back=True)
    for index in reversed(range(len(model.layers))):
        if model.ring is not None:
            model.ring.use(index)
        is_first = index == 0 and model.is_first
        before = backward(model.layers[index], passed.take_last(), grad, passed.context, is_first=is_first)
        if before is not None:
            grad = before
    if model.ring is not None:
        model.ring.end(then_back=False)
    if not model.is_first:
        return grad.dx_TD
    dx_TD = grad.dx_TD if model.input_scale is None else grad.dx_TD * model.input_scale
    passed.context.changes.rows_grad("input", model.input_rows, dx_TD)
    return None


def _last_grad(passed: Passed, grad_TD: torch.Tensor) -> ResidualGrad:
    model, y = passed.context.model, added(passed.y_TD, passed.context.model.post)
    if model.norm is not None:
        found = norm_grad(passed.last_TD, model.norm, grad_TD, None, False, y)
        return ResidualGrad(found.dx_TD, found.dy_TD)
    return ResidualGrad(grad_TD, grad_TD if y is None else norm_grad(*y, grad_TD, None, False).dx_TD)


@dataclass(frozen=True)
class OffloadedLayer:
    kept: SavedForBackward
    host: dict[str, torch.Tensor]
    device: dict[str, torch.Tensor]

    def with_large(self, tensors: dict[str, torch.Tensor]) -> SavedForBackward:
        kept: SavedForBackward = replace(self.kept, **tensors)  # type: ignore[arg-type]
        return kept


class Offload:
    def __init__(self, device: torch.device, names: Sequence[str]) -> None:
        self._names = names
        self._stream = Stream(device) if has_streams(device) else None

    def store(self, kept: SavedForBackward) -> OffloadedLayer:
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
        # Their stand-ins are never read.
        stub = OffloadedLayer(kept, host, {}).with_large({name: torch.empty(0) for name in host})
        return OffloadedLayer(stub, host, {})

    def fetch(self, parked: OffloadedLayer, following: OffloadedLayer | None) -> SavedForBackward:
        """A layer's tensors, back on the device; also starts to fetch those of the next layer."""
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
