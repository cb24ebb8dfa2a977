"""One decoder layer, forward and backward written out, with every adapter's part beside the frozen products.

Forward, from the residual stream x and what the layer before still has to add to it:
    x = x + y;             h = norm(x)
    qkv = h Wᵀ + S₁ Bᵀ;    S₁ = shrink(h);   q, k, v = rotate(qkv);   o = attention(q, k, v)
    y = o Wᵀ + S₂ Bᵀ;      S₂ = shrink(o);   x' = x + y;   h' = norm(x')
    gu = h' Wᵀ + S₃ Bᵀ;    S₃ = shrink(h');  act = gated(gu)
    y' = act Wᵀ + S₄ Bᵀ;   S₄ = shrink(act); handed to the next layer with x'
Changes by other methods at these sites are in `changes.py`. In some families y and y' are normed before they are added,
or multiplied by a number, and some have no other norms: there h is x.
Kept is what `families/kept` lists: x, q/k/v, o, x', gu, the S, and y where it is normed; norms and act are made again
on the way back. With `recompute` "mlp" gu is made again too, from the S that was kept, and with "full" everything but x
and the y that went into it.

Backward, from dx' (of what this layer handed on), runs the same lines from the last to the first; the gradient of a
site's input is dy W + drop(dS A). The frozen product adds the adapters' part itself where `kernels/product` fits the
GPU; else `expand` writes it and the frozen product adds itself to it, or, where it cannot (FP8), `expand` adds it.

Where devices share the layer, each has some heads and some rows of gate and up. Then y, y' and, on the way back, the
gradients of h and h' are parts until they are added up: four times in a layer, as on the reference path
(`adapters/devices.py`). Before that, all is linear in what is divided, other methods included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Protocol

import torch

from weft.kernels.layers.gated import gated, gated_grad, rounded_gated, rounded_gated_grad
from weft.kernels.layers.rms_norm import Added, RmsNorm, add_norm, norm_grad
from weft.kernels.layers.rotary import Turns, rotate, rotate_grad
from weft.kernels.lora.expand import expand, expand_grad
from weft.kernels.lora.product import fits, product_grad_kernel, product_kernel
from weft.kernels.lora.shrink import shrink, shrink_grad
from weft.kernels.lora.step import step_product_kernel
from weft.kernels.lora.tables import Delta, SlotTable
from weft.kernels.lora.weight_grad import weight_grad
from weft.kernels.storage import Rows8
from weft.model.fused.changes import OtherChanges, SavedBlockEnd
from weft.model.fused.inputs import Attended, Inputs, attention, no_gradients
from weft.model.fused.model import FusedLayer, FusedModel, Product
from weft.model.path import Recompute


@dataclass(frozen=True)
class ResidualStream:
    x_TD: torch.Tensor
    y_TD: torch.Tensor | None = None


@dataclass(frozen=True)
class ResidualGrad:
    """The gradients between two layers: of the residual stream, and of the output that was added to it last."""

    dx_TD: torch.Tensor
    dy_TD: torch.Tensor
    """dx itself, unless the added output was normed."""


@dataclass(frozen=True)
class SavedForBackward:
    """Tensors that a layer's backward needs; None: recomputed, or not needed by this family."""

    x_TD: torch.Tensor
    y_TD: torch.Tensor | None = None
    s_qkv: Delta | None = None
    raw_qkv_TE: torch.Tensor | None = None
    """Before head norms, in models that have them."""
    attended: Attended | None = None
    s_out: Delta | None = None
    y_mid_TD: torch.Tensor | None = None
    """Output of attention, if it is normed."""
    mid_TD: torch.Tensor | None = None
    s_gate_up: Delta | None = None
    gu_TJ: torch.Tensor | None = None
    s_down: Delta | None = None
    before_qkv_TE: torch.Tensor | None = None
    before_out_TD: torch.Tensor | None = None
    before_down_TD: torch.Tensor | None = None
    attention_end: SavedBlockEnd | None = None
    mlp_end: SavedBlockEnd | None = None


class KeyCache(Protocol):
    """Keeps keys and values for later passes, and attends to those of earlier ones; forward only."""

    begins: ClassVar[bool]
    """Whether samples begin in this pass, with the rows in front that adapters fill."""

    def attend(
        self, index: int, layer: FusedLayer, qkv_TE: torch.Tensor, inputs: Inputs, model: FusedModel
    ) -> torch.Tensor:
        """Output of attention (T, H, C) in the layer of this index."""


@dataclass(frozen=True)
class Context:
    model: FusedModel
    inputs: Inputs
    table: SlotTable
    turns: tuple[Turns, ...]
    """The angles of every kind of layer."""
    row_tile: int | None
    recompute: Recompute
    needs_grad: bool
    cache: KeyCache | None = None

    @cached_property
    def changes(self) -> OtherChanges:
        begins = self.cache is None or self.cache.begins
        return OtherChanges(self.inputs.rows, self.table, self.inputs.shape.is_adapted, begins)

    def attend(self, layer: FusedLayer, qkv_TE: torch.Tensor) -> Attended:
        model = self.model
        if self.cache is None:
            heads, scale = model.heads, model.attention_scale
            return attention(qkv_TE, heads, self.inputs, scale, layer.window, needs_grad=self.needs_grad)
        index = layer.sites.keys_and_values - model.layers[0].sites.keys_and_values
        return Attended(self.cache.attend(index, layer, qkv_TE, self.inputs, model), no_gradients)

    def linear(
        self, product: Product, x_TD: torch.Tensor, x8: Rows8 | None = None
    ) -> tuple[torch.Tensor, Delta | None]:
        if self.inputs.is_step and self.inputs.shape.is_adapted and fits(product.site, x_TD, backward=False):
            factors = product.weight.factors(x_TD, x8)
            y_TO = _biased(step_product_kernel(x_TD, factors, product.site, self.inputs.rows, self.table), product)
            self.changes.sparse(product.site, x_TD, y_TO)
            return y_TO, None
        s = self._shrunk(product, x_TD, shrink)
        return self.output(product, x_TD, s, x8), s

    def output(self, product: Product, x_TD: torch.Tensor, s: Delta | None, x8: Rows8 | None = None) -> torch.Tensor:
        """A site's outputs including the adapters' part, from an existing S."""
        y_TO = self._output(product, x_TD, s, x8)
        self.changes.sparse(product.site, x_TD, y_TO)
        return y_TO

    def _output(self, product: Product, x_TD: torch.Tensor, s: Delta | None, x8: Rows8 | None) -> torch.Tensor:
        if s is None:
            return self._frozen(product, x_TD, x8=x8)
        if fits(product.site, x_TD, backward=False):
            y_TO = product_kernel(product.weight.factors(x_TD, x8), s.s_TR, s.site, s.rows, s.table)
            return _biased(y_TO, product)
        if not product.weight.adds_up:
            y_TO = self._frozen(product, x_TD, x8=x8)
            expand(y_TO, s.s_TR, s.site, s.rows, s.table)
            return y_TO
        y_TO = x_TD.new_empty(x_TD.shape[0], product.site.num_out)
        expand(y_TO, s.s_TR, s.site, s.rows, s.table, adds=False)
        return self._frozen(product, x_TD, y_TO)

    def _frozen(
        self, product: Product, x_TD: torch.Tensor, onto_TO: torch.Tensor | None = None, x8: Rows8 | None = None
    ) -> torch.Tensor:
        return _biased(product.weight.product(x_TD, self.row_tile, onto_TO, x8), product)

    def input_gradient(
        self, product: Product, dy_TO: torch.Tensor, ds: Delta | None, dy8: Rows8 | None = None
    ) -> torch.Tensor:
        dx_TD = self._input_gradient(product, dy_TO, ds, dy8)
        self.changes.sparse_input(product.site, dy_TO, dx_TD)
        return dx_TD

    def _input_gradient(
        self, product: Product, dy_TO: torch.Tensor, ds: Delta | None, dy8: Rows8 | None
    ) -> torch.Tensor:
        weight = product.weight
        if ds is None:
            return weight.input_gradient(dy_TO, self.row_tile, dy8=dy8)
        if fits(product.site, dy_TO, backward=True):
            return product_grad_kernel(weight.gradient_factors(dy_TO, dy8), ds.s_TR, ds.site, ds.rows, ds.table)
        if not weight.adds_up:
            dx_TD = weight.input_gradient(dy_TO, self.row_tile, dy8=dy8)
            expand_grad(dx_TD, ds.s_TR, ds.site, ds.rows, ds.table)
            return dx_TD
        dx_TD = dy_TO.new_empty(dy_TO.shape[0], product.site.num_in)
        expand_grad(dx_TD, ds.s_TR, ds.site, ds.rows, ds.table, adds=False)
        return weight.input_gradient(dy_TO, self.row_tile, dx_TD)

    def shrunk_grad(self, product: Product, dy_TO: torch.Tensor) -> Delta | None:
        return self._shrunk(product, dy_TO, shrink_grad)

    def _shrunk(self, product: Product, x: torch.Tensor, run: Callable[..., None]) -> Delta | None:
        if not self.inputs.shape.is_adapted:
            return None
        s_TR = x.new_empty(x.shape[0], len(product.site.sizes) * self.table.rank_class)
        run(x, s_TR, product.site, self.inputs.rows, self.table)
        return Delta(s_TR, product.site, self.inputs.rows, self.table)

    def weight_grad(self, x_TD: torch.Tensor, s: Delta | None, dy_TO: torch.Tensor, ds: Delta | None) -> None:
        if s is not None and ds is not None:
            weight_grad(x_TD, s.s_TR, dy_TO, ds.s_TR, s.site, s.rows, s.table)
            self.changes.sparse_grad(s.site, x_TD, dy_TO)


def _biased(y_TO: torch.Tensor, product: Product) -> torch.Tensor:
    return y_TO if product.bias_O is None else y_TO.add_(product.bias_O)


def added(y_TD: torch.Tensor | None, post: RmsNorm | None) -> Added | None:
    """An output before it is added to the residual stream, with its norm if it has one."""
    return None if y_TD is None or post is None else (y_TD, post)


def _scaled(y_TD: torch.Tensor, model: FusedModel) -> torch.Tensor:
    """A block's output, or its gradient, times the factor with which it is added to the residual stream."""
    return y_TD if model.residual_scale is None else y_TD * model.residual_scale


def forward(layer: FusedLayer, stream: ResidualStream, context: Context) -> tuple[ResidualStream, SavedForBackward]:
    """The stream after the layer, and the tensors for its backward."""
    model = context.model
    x_TD, h_TD = add_norm(stream.x_TD, stream.y_TD, layer.norm_in, layer.post_in)
    y_in_TD = stream.y_TD if layer.post_in is not None else None
    raw_TE, s_qkv = context.linear(layer.qkv, h_TD)
    del h_TD
    changes, sites = context.changes, layer.sites
    before_qkv_TE = changes.outputs(layer.qkv.site, raw_TE)
    qkv_TE = rotate(raw_TE, context.turns[layer.rotary], model.heads, layer.head_norms)
    changes.put_rows("kv", sites.keys_and_values, qkv_TE[:, model.heads.sizes[0] :])
    attended = context.attend(layer, qkv_TE)
    y_TD, s_out = context.linear(layer.out, attended.output_THC.flatten(1))
    before_out_TD = changes.outputs(layer.out.site, y_TD)
    y_TD = model.added_up(y_TD)
    attention_end = changes.end(sites.attention_end, y_TD)
    y_TD = _scaled(y_TD, model)
    mid_TD, h_TD = add_norm(x_TD, y_TD, layer.norm_mid, layer.post_mid)
    y_mid_TD = y_TD if layer.post_mid is not None else None
    del y_TD
    gu_TJ, s_gate_up = context.linear(layer.gate_up, h_TD)
    changes.outputs_again(layer.gate_up.site, gu_TJ)
    del h_TD
    rounds = layer.down.weight.rounds_inputs
    act_TI, act8 = rounded_gated(gu_TJ, model.activation) if rounds else (gated(gu_TJ, model.activation), None)
    if changes.inputs(layer.down.site, act_TI):
        act8 = None
    y_TD, s_down = context.linear(layer.down, act_TI, act8)
    before_down_TD = changes.outputs(layer.down.site, y_TD)
    y_TD = model.added_up(y_TD)
    mlp_end = changes.end(sites.mlp_end, y_TD)
    after = ResidualStream(mid_TD, _scaled(y_TD, model))
    if not context.needs_grad or context.recompute == "full":
        return after, SavedForBackward(x_TD, y_in_TD)
    return after, SavedForBackward(
        x_TD=x_TD,
        y_TD=y_in_TD,
        s_qkv=s_qkv,
        raw_qkv_TE=raw_TE if layer.head_norms is not None else None,
        attended=attended,
        s_out=s_out,
        y_mid_TD=y_mid_TD,
        mid_TD=mid_TD,
        s_gate_up=s_gate_up,
        gu_TJ=None if context.recompute == "mlp" else gu_TJ,
        s_down=s_down,
        before_qkv_TE=before_qkv_TE,
        before_out_TD=before_out_TD,
        before_down_TD=before_down_TD,
        attention_end=attention_end,
        mlp_end=mlp_end,
    )


def backward(
    layer: FusedLayer, kept: SavedForBackward, grad: ResidualGrad, context: Context, *, is_first: bool
) -> ResidualGrad | None:
    """The gradient before the layer (None before the first); adds to all adapters' gradients."""
    if kept.attended is None:
        everything = replace(context, recompute="none")
        _, again = forward(layer, ResidualStream(kept.x_TD), everything)
        kept = replace(again, y_TD=kept.y_TD)
    mid = _backward_mlp(layer, kept, grad, context)
    return _backward_attention(layer, kept, mid, context, is_first=is_first)


def _backward_mlp(layer: FusedLayer, kept: SavedForBackward, grad: ResidualGrad, context: Context) -> ResidualGrad:
    activation, is_adapted = context.model.activation, context.inputs.shape.is_adapted
    changes = context.changes
    assert kept.mid_TD is not None
    gu_TJ = kept.gu_TJ
    if gu_TJ is None:
        _, again_TD = add_norm(kept.mid_TD, None, layer.norm_mid)
        gu_TJ = context.output(layer.gate_up, again_TD, kept.s_gate_up)
        changes.outputs_again(layer.gate_up.site, gu_TJ)
        del again_TD
    dy_TD = changes.end_grad(layer.sites.mlp_end, _scaled(grad.dy_TD, context.model), kept.mlp_end)
    dy_TD = changes.outputs_grad(layer.down.site, dy_TD, kept.before_down_TD, stays=dy_TD is grad.dy_TD)
    ds_down = context.shrunk_grad(layer.down, dy_TD)
    dact_TI = context.input_gradient(layer.down, dy_TD, ds_down)
    changes.inputs(layer.down.site, dact_TI)
    own_TJ = changes.owned(layer.gate_up.site, gu_TJ)
    columns_J, dgu8 = layer.gate_up.weight.gradient_columns, None
    if columns_J is None:
        dgu_TJ, act_TI = gated_grad(gu_TJ, dact_TI, is_adapted, activation)
    else:
        dgu_TJ, act_TI, dgu8 = rounded_gated_grad(gu_TJ, dact_TI, is_adapted, columns_J, activation)
    del gu_TJ
    if act_TI is not None:
        changes.inputs_grad(layer.down.site, dact_TI, act_TI)
        context.weight_grad(act_TI, kept.s_down, dy_TD, ds_down)
    del act_TI, dact_TI
    if changes.outputs_grad_in_place(layer.gate_up.site, dgu_TJ, own_TJ, is_changed=True):
        dgu8 = None
    del own_TJ
    ds_gate_up = context.shrunk_grad(layer.gate_up, dgu_TJ)
    dh_TD = context.model.added_up(context.input_gradient(layer.gate_up, dgu_TJ, ds_gate_up, dgu8))
    del dgu8
    attended = added(kept.y_mid_TD, layer.post_mid)
    found = norm_grad(kept.mid_TD, layer.norm_mid, dh_TD, grad.dx_TD, is_adapted, attended)
    if found.h_TD is not None:
        context.weight_grad(found.h_TD, kept.s_gate_up, dgu_TJ, ds_gate_up)
    return ResidualGrad(found.dx_TD, found.dy_TD)


def _backward_attention(
    layer: FusedLayer, kept: SavedForBackward, grad: ResidualGrad, context: Context, *, is_first: bool
) -> ResidualGrad | None:
    is_adapted = context.inputs.shape.is_adapted
    assert kept.attended is not None
    attended_TD = kept.attended.output_THC.flatten(1)
    changes, sites = context.changes, layer.sites
    dy_TD = changes.end_grad(sites.attention_end, _scaled(grad.dy_TD, context.model), kept.attention_end)
    dy_TD = changes.outputs_grad(layer.out.site, dy_TD, kept.before_out_TD, stays=dy_TD is grad.dy_TD)
    ds_out = context.shrunk_grad(layer.out, dy_TD)
    do_TD = context.input_gradient(layer.out, dy_TD, ds_out)
    context.weight_grad(attended_TD, kept.s_out, dy_TD, ds_out)
    dq, dk, dv = kept.attended.gradients(do_TD.view_as(kept.attended.output_THC))
    del do_TD, dy_TD
    changes.rows_grad("kv", sites.keys_and_values, dk.flatten(1), dv.flatten(1))
    turns, heads = context.turns[layer.rotary], context.model.heads
    dqkv_TE = rotate_grad(dq, dk, dv, turns, heads, layer.head_norms, kept.raw_qkv_TE)
    del dq, dk, dv
    changes.outputs_grad_in_place(layer.qkv.site, dqkv_TE, kept.before_qkv_TE)
    ds_qkv = context.shrunk_grad(layer.qkv, dqkv_TE)
    if is_first and not changes.has_rows("input"):
        # Nothing below trains: only the adapters here still need their gradients.
        if is_adapted:
            context.weight_grad(add_norm(kept.x_TD, None, layer.norm_in)[1], kept.s_qkv, dqkv_TE, ds_qkv)
        return None
    dh_TD = context.model.added_up(context.input_gradient(layer.qkv, dqkv_TE, ds_qkv))
    before = added(kept.y_TD, layer.post_in)
    found = norm_grad(kept.x_TD, layer.norm_in, dh_TD, grad.dx_TD, is_adapted, before)
    if found.h_TD is not None:
        context.weight_grad(found.h_TD, kept.s_qkv, dqkv_TE, ds_qkv)
    return ResidualGrad(found.dx_TD, found.dy_TD)
