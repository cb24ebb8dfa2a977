"""One decoder layer, forward and backward written out, with every adapter's part beside the frozen products.

Forward, from the residual stream x and what the layer before still has to add to it:
    x = x + y;             h = norm(x)
    qkv = h Wᵀ + S₁ Bᵀ;    S₁ = shrink(h);   q, k, v = rotate(qkv);   o = attention(q, k, v)
    y = o Wᵀ + S₂ Bᵀ;      S₂ = shrink(o);   x' = x + y;   h' = norm(x')
    gu = h' Wᵀ + S₃ Bᵀ;    S₃ = shrink(h');  act = swiglu(gu)
    y' = act Wᵀ + S₄ Bᵀ;   S₄ = shrink(act); handed to the next layer with x'
Kept: x, q/k/v, o, x', gu and the S; norms and act are made again on the way back. With `recompute` "mlp" gu is made
again too, from the S that was kept, and with "full" everything but x.

Backward, from dx' (of what this layer handed on), runs the same lines from the last to the first; the gradient of a
site's input is dy W + drop(dS A). The frozen product adds the adapters' part itself where `kernels/product` fits the
GPU; else `expand` writes it and the frozen product adds itself to it, or, where it cannot (FP8), `expand` adds it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from weft.backbone.fused.attention import Attended, attention
from weft.backbone.fused.inputs import Inputs
from weft.backbone.fused.memory import Recompute
from weft.backbone.fused.model import FusedLayer, FusedModel, Product
from weft.kernels.layers.rms_norm import add_norm, norm_grad
from weft.kernels.layers.rotary import rotate, rotate_grad
from weft.kernels.layers.rounded_swiglu import rounded_swiglu, rounded_swiglu_grad
from weft.kernels.layers.swiglu import swiglu, swiglu_grad
from weft.kernels.lora.expand import expand, expand_grad
from weft.kernels.lora.product import fits, product_grad_kernel, product_kernel
from weft.kernels.lora.shrink import shrink, shrink_grad
from weft.kernels.lora.tables import Delta, SlotTable
from weft.kernels.lora.weight_grad import weight_grad
from weft.kernels.storage.fp8 import Rows8


@dataclass(frozen=True)
class ResidualStream:
    """The residual stream between two layers: x, and what is still to be added to it."""

    x_TD: torch.Tensor
    y_TD: torch.Tensor | None = None


@dataclass(frozen=True)
class Kept:
    """What a layer's backward needs of its forward; None: to be made again."""

    x_TD: torch.Tensor
    s_qkv: Delta | None = None
    raw_qkv_TE: torch.Tensor | None = None
    """Before head norms, where a model has them."""
    attended: Attended | None = None
    s_out: Delta | None = None
    mid_TD: torch.Tensor | None = None
    s_gate_up: Delta | None = None
    gu_TJ: torch.Tensor | None = None
    s_down: Delta | None = None


@dataclass(frozen=True)
class Context:
    """What all layers of a microbatch share."""

    model: FusedModel
    inputs: Inputs
    table: SlotTable
    cos_TF: torch.Tensor
    sin_TF: torch.Tensor
    row_tile: int | None
    recompute: Recompute
    needs_grad: bool

    def linear(
        self, product: Product, x_TD: torch.Tensor, x8: Rows8 | None = None
    ) -> tuple[torch.Tensor, Delta | None]:
        """A site's outputs with the adapters' part, and S."""
        s = self._shrunk(product, x_TD, shrink)
        return self.output(product, x_TD, s, x8), s

    def output(self, product: Product, x_TD: torch.Tensor, s: Delta | None, x8: Rows8 | None = None) -> torch.Tensor:
        """A site's outputs with the adapters' part from an S that is there already."""
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
        """The frozen product alone, or added to what is there."""
        return _biased(product.weight.product(x_TD, self.row_tile, onto_TO, x8), product)

    def input_gradient(
        self, product: Product, dy_TO: torch.Tensor, ds: Delta | None, dy8: Rows8 | None = None
    ) -> torch.Tensor:
        """The gradient of a site's input with the adapters' part."""
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
        """The adapters' dS at a site."""
        return self._shrunk(product, dy_TO, shrink_grad)

    def _shrunk(self, product: Product, x: torch.Tensor, run: Callable[..., None]) -> Delta | None:
        if not self.inputs.shape.is_adapted:
            return None
        s_TR = x.new_empty(x.shape[0], len(product.site.sizes) * self.table.rank_class)
        run(x, s_TR, product.site, self.inputs.rows, self.table)
        return Delta(s_TR, product.site, self.inputs.rows, self.table)

    def weight_grad(self, x_TD: torch.Tensor, s: Delta | None, dy_TO: torch.Tensor, ds: Delta | None) -> None:
        """Adds to the gradients of all adapters at a site."""
        if s is not None and ds is not None:
            weight_grad(x_TD, s.s_TR, dy_TO, ds.s_TR, s.site, s.rows, s.table)


def _biased(y_TO: torch.Tensor, product: Product) -> torch.Tensor:
    return y_TO if product.bias_O is None else y_TO.add_(product.bias_O)


def forward(layer: FusedLayer, stream: ResidualStream, context: Context) -> tuple[ResidualStream, Kept]:
    """The stream after the layer, and what its backward needs."""
    eps = context.model.eps
    x_TD, h_TD = add_norm(stream.x_TD, stream.y_TD, layer.norm_in_D, eps)
    raw_TE, s_qkv = context.linear(layer.qkv, h_TD)
    del h_TD
    qkv_TE = rotate(raw_TE, context.cos_TF, context.sin_TF, context.model.heads, layer.head_norms)
    attended = attention(
        qkv_TE,
        context.model.heads,
        context.inputs,
        context.model.attention_scale,
        layer.window,
        needs_grad=context.needs_grad,
    )
    y_TD, s_out = context.linear(layer.out, attended.output_THC.flatten(1))
    mid_TD, h_TD = add_norm(x_TD, y_TD, layer.norm_mid_D, eps)
    del y_TD
    gu_TJ, s_gate_up = context.linear(layer.gate_up, h_TD)
    del h_TD
    act_TI, act8 = rounded_swiglu(gu_TJ) if layer.down.weight.rounds_inputs else (swiglu(gu_TJ), None)
    y_TD, s_down = context.linear(layer.down, act_TI, act8)
    after = ResidualStream(mid_TD, y_TD)
    if not context.needs_grad or context.recompute == "full":
        return after, Kept(x_TD)
    raw = raw_TE if layer.head_norms is not None else None
    gu = None if context.recompute == "mlp" else gu_TJ
    return after, Kept(x_TD, s_qkv, raw, attended, s_out, mid_TD, s_gate_up, gu, s_down)


def backward(
    layer: FusedLayer, kept: Kept, dx_TD: torch.Tensor, context: Context, *, is_first: bool
) -> torch.Tensor | None:
    """The gradient of the stream before the layer (None before the first); adds to all adapters' gradients."""
    if kept.attended is None:
        everything = replace(context, recompute="none")
        _, kept = forward(layer, ResidualStream(kept.x_TD), everything)
    dmid_TD = _backward_mlp(layer, kept, dx_TD, context)
    return _backward_attention(layer, kept, dmid_TD, context, is_first=is_first)


def _backward_mlp(layer: FusedLayer, kept: Kept, dx_TD: torch.Tensor, context: Context) -> torch.Tensor:
    model, is_adapted = context.model, context.inputs.shape.is_adapted
    assert kept.mid_TD is not None
    gu_TJ = kept.gu_TJ
    if gu_TJ is None:
        _, again_TD = add_norm(kept.mid_TD, None, layer.norm_mid_D, model.eps)
        gu_TJ = context.output(layer.gate_up, again_TD, kept.s_gate_up)
        del again_TD
    ds_down = context.shrunk_grad(layer.down, dx_TD)
    dact_TI = context.input_gradient(layer.down, dx_TD, ds_down)
    columns_J, dgu8 = layer.gate_up.weight.gradient_columns, None
    if columns_J is None:
        dgu_TJ, act_TI = swiglu_grad(gu_TJ, dact_TI, is_adapted)
    else:
        dgu_TJ, act_TI, dgu8 = rounded_swiglu_grad(gu_TJ, dact_TI, is_adapted, columns_J)
    del gu_TJ, dact_TI
    if act_TI is not None:
        context.weight_grad(act_TI, kept.s_down, dx_TD, ds_down)
    del act_TI
    ds_gate_up = context.shrunk_grad(layer.gate_up, dgu_TJ)
    dh_TD = context.input_gradient(layer.gate_up, dgu_TJ, ds_gate_up, dgu8)
    del dgu8
    dmid_TD, h_TD = norm_grad(kept.mid_TD, layer.norm_mid_D, model.eps, dh_TD, dx_TD, is_adapted)
    if h_TD is not None:
        context.weight_grad(h_TD, kept.s_gate_up, dgu_TJ, ds_gate_up)
    return dmid_TD


def _backward_attention(
    layer: FusedLayer, kept: Kept, dmid_TD: torch.Tensor, context: Context, *, is_first: bool
) -> torch.Tensor | None:
    model, is_adapted = context.model, context.inputs.shape.is_adapted
    assert kept.attended is not None
    attended_TD = kept.attended.output_THC.flatten(1)
    ds_out = context.shrunk_grad(layer.out, dmid_TD)
    do_TD = context.input_gradient(layer.out, dmid_TD, ds_out)
    context.weight_grad(attended_TD, kept.s_out, dmid_TD, ds_out)
    dq, dk, dv = kept.attended.gradients(do_TD.view_as(kept.attended.output_THC))
    del do_TD
    turns = (context.cos_TF, context.sin_TF, model.heads)
    dqkv_TE = rotate_grad(dq, dk, dv, *turns, layer.head_norms, kept.raw_qkv_TE)
    del dq, dk, dv
    ds_qkv = context.shrunk_grad(layer.qkv, dqkv_TE)
    if is_first:
        # Nothing below trains: only the adapters here still need their gradients.
        if is_adapted:
            context.weight_grad(add_norm(kept.x_TD, None, layer.norm_in_D, model.eps)[1], kept.s_qkv, dqkv_TE, ds_qkv)
        return None
    dh_TD = context.input_gradient(layer.qkv, dqkv_TE, ds_qkv)
    dx_TD, h_TD = norm_grad(kept.x_TD, layer.norm_in_D, model.eps, dh_TD, dmid_TD, is_adapted)
    if h_TD is not None:
        context.weight_grad(h_TD, kept.s_qkv, dqkv_TE, ds_qkv)
    return dx_TD
