"""The fused step: a whole microbatch forward and back, adding to every adapter's gradients.

Where the model is a part of one, the residual stream enters it and leaves it with everything added, and so does its
gradient the other way: one tensor crosses a cut, and each layer sees the numbers it would see in one piece.

The same lines run on a GPU over Triton kernels and on a CPU over their plain twins. Shape suffixes: T rows, D hidden
size, F rotary frequencies.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from weft.kernels.layers.rms_norm import add, add_norm, norm_grad
from weft.kernels.lora.tables import SlotTable
from weft.model.fused.inputs import Inputs
from weft.model.fused.layer import Context, ResidualGrad, ResidualStream, SavedForBackward, added, backward, forward
from weft.model.fused.model import FusedModel
from weft.model.fused.offload import Offload, OffloadedLayer
from weft.model.path import Memory


@dataclass
class Passed:
    """What a forward pass leaves for the backward pass."""

    context: Context
    left_TD: torch.Tensor
    """After the last norm, or what the next part of the model goes on with."""
    last_TD: torch.Tensor
    """Before the last norm."""
    y_TD: torch.Tensor | None = None
    """What the last layer here added, where a family norms that."""
    kept: list[SavedForBackward] = field(default_factory=list)
    """Layer by layer; with `offload` they are in `parked` instead."""
    parked: list[OffloadedLayer] = field(default_factory=list)
    offload: Offload | None = None

    def take_last(self) -> SavedForBackward:
        """What the last layer kept; its memory is free as soon as that layer is done."""
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
) -> Passed:
    """The hidden states of a microbatch, and with `needs_grad` what its backward needs.

    `entering_TD`: what the part of the model before this one has made.
    """
    turns = tuple(rotary.turns(inputs.part("positions")) for rotary in model.rotaries)
    context = Context(model, inputs, table, turns, row_tile, memory.recompute, needs_grad)
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
    """What the first layer sees."""
    model, ids = context.model, context.inputs.part("ids")
    assert model.embedding_VD is not None, "a later part of a model goes on with what entered"
    embedded_TD = F.embedding(ids, model.embedding_VD)
    if model.embedding_scale is not None:
        embedded_TD *= model.embedding_scale
    context.changes.put_rows("input", model.input_rows, embedded_TD)
    return embedded_TD


@torch.no_grad()
def run_backward(passed: Passed, grad_TD: torch.Tensor) -> torch.Tensor | None:
    """From the gradient of what left back to the first layer here; adds to every adapter's gradients.

    Returns the gradient of what entered; None where that were embeddings.
    """
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
    passed.context.changes.rows_grad("input", model.input_rows, grad.dx_TD)
    return None


def _last_grad(passed: Passed, grad_TD: torch.Tensor) -> ResidualGrad:
    """The gradient behind the last layer here."""
    model, y = passed.context.model, added(passed.y_TD, passed.context.model.post)
    if model.norm is not None:
        found = norm_grad(passed.last_TD, model.norm, grad_TD, None, False, y)
        return ResidualGrad(found.dx_TD, found.dy_TD)
    return ResidualGrad(grad_TD, grad_TD if y is None else norm_grad(*y, grad_TD, None, False).dx_TD)
