"""The fused step: a whole microbatch forward and back, adding to every adapter's gradients.

The same lines run on a GPU over Triton kernels and on a CPU over their plain twins. Shape suffixes: T rows, D hidden
size, F rotary frequencies.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from weft.backbone.fused.inputs import Inputs
from weft.backbone.fused.layer import Context, Kept, ResidualGrad, ResidualStream, added, backward, forward
from weft.backbone.fused.model import FusedModel
from weft.backbone.fused.offload import Offload, Parked
from weft.backbone.path import Memory
from weft.kernels.layers.rms_norm import add_norm, norm_grad
from weft.kernels.lora.tables import SlotTable


@dataclass
class Passed:
    """What a forward pass leaves for the backward pass."""

    context: Context
    hidden_TD: torch.Tensor
    """After the last norm."""
    last_TD: torch.Tensor
    """Before the last norm."""
    y_TD: torch.Tensor | None = None
    """What the last layer added, where a family norms that."""
    kept: list[Kept] = field(default_factory=list)
    """Layer by layer; with `offload` they are in `parked` instead."""
    parked: list[Parked] = field(default_factory=list)
    offload: Offload | None = None

    def take_last(self) -> Kept:
        """What the last layer kept; its memory is free as soon as that layer is done."""
        if self.offload is None:
            return self.kept.pop()
        last = self.parked.pop()
        return self.offload.fetch(last, self.parked[-1] if self.parked else None)


@torch.no_grad()
def run_forward(
    model: FusedModel, inputs: Inputs, table: SlotTable, row_tile: int | None, memory: Memory, *, needs_grad: bool
) -> Passed:
    """The hidden states of a microbatch, and with `needs_grad` what its backward needs."""
    turns = tuple(rotary.turns(inputs.part("positions")) for rotary in model.rotaries)
    context = Context(model, inputs, table, turns, row_tile, memory.recompute, needs_grad)
    embedded_TD = F.embedding(inputs.part("ids"), model.embedding_VD)
    if model.embedding_scale is not None:
        embedded_TD *= model.embedding_scale
    context.changes.put_rows("input", model.input_rows, embedded_TD)
    stream = ResidualStream(embedded_TD)
    offload = Offload(stream.x_TD.device, model.moved) if memory.offload and needs_grad else None
    kept: list[Kept] = []
    parked: list[Parked] = []
    if model.ring is not None:
        model.ring.begin(back=needs_grad)
    for index, layer in enumerate(model.layers):
        if model.ring is not None:
            model.ring.use(index)
        stream, saved = forward(layer, stream, context)
        if offload is not None:
            parked.append(offload.store(saved))
        elif needs_grad:
            kept.append(saved)
    if model.ring is not None and not needs_grad:
        model.ring.end()
    last_TD, hidden_TD = add_norm(stream.x_TD, stream.y_TD, model.norm, model.post)
    y_TD = stream.y_TD if model.post is not None and needs_grad else None
    return Passed(context, hidden_TD, last_TD, y_TD, kept, parked, offload)


@torch.no_grad()
def run_backward(passed: Passed, grad_TD: torch.Tensor) -> None:
    """From the gradient of the hidden states back to the first layer; adds to every adapter's gradients."""
    model = passed.context.model
    found = norm_grad(passed.last_TD, model.norm, grad_TD, None, False, added(passed.y_TD, model.post))
    grad = ResidualGrad(found.dx_TD, found.dy_TD)
    passed.y_TD = None
    del found
    for index in reversed(range(len(model.layers))):
        if model.ring is not None:
            model.ring.use(index)
        before = backward(model.layers[index], passed.take_last(), grad, passed.context, is_first=index == 0)
        if before is not None:
            grad = before
    if model.ring is not None:
        model.ring.end()
    passed.context.changes.rows_grad("input", model.input_rows, grad.dx_TD)
