"""Bytes that autograd keeps of a row from a model's own modules until the way back, counted from their shapes.

    linears     inputs of those that adapters sit on, once where several read the same, and outputs: those of q, k and v
                as attention has them, gate and up as they enter the activation
    norms       their inputs in fp32
    attention   keys and values of every query head, and outputs put together, where no kernel takes all samples
    activation  its result, which is multiplied with the other half
    experts     of each of a row's choices what leaves both products, and the activation's parts between them; where
                adapters train experts also what enters both; the router's scores and their order
    mixers      what one of them computes again, one after the other (`workspace_bytes`)

`tests/model/test_kept.py` compares it with what is really kept, family by family. Models without experts and mixers
have a margin: what joins the residual stream, and the result of every activation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from weft.adapters.experts import ExpertSite, sites_of
from weft.adapters.sites import SlotLinear
from weft.adapters.targets import is_named
from weft.model.packing.attention import SINK_NUMBERS
from weft.model.packing.experts import experts_of
from weft.model.packing.mixers import is_mixer, workspace_bytes
from weft.plan.families import spared
from weft.plan.weights import num_chosen

_FP32 = torch.float32.itemsize
_ROUTER = 16
"""Bytes for each expert of a router: scores, their shares in fp32, and 8-byte numbers of their order."""
_WIDEST_HEAD = 256
"""Largest head that kernels of attention take."""


def row_bytes(model: Any, dtype: torch.dtype) -> int:
    """Bytes of a row in all layers, with adapters on all linears and frozen experts."""
    hidden: int = model.get_input_embeddings().weight.shape[1]
    experts = list(experts_of(model).values())
    left_out = spared(model.config.model_type)
    has_margin = not experts and not any(map(is_mixer, model.modules()))
    width = normed = 0
    for path, module in model.named_modules():
        linears = {name: child for name, child in module.named_children() if isinstance(child, SlotLinear)}
        if linears:
            joining = linears.get("o_proj") or linears.get("out_proj") or list(linears.values())[-1]
            adapted = {name: own for name, own in linears.items() if not is_named(f"{path}.{name}", left_out)}
            width += _inputs(adapted, joining) + _outputs(linears, joining, hidden, has_margin=has_margin)
            if not is_mixer(module):
                width += _attention(module, linears, joining, dtype)
                width += _activation(module, linears, has_margin=has_margin)
        if not is_mixer(module):
            normed += sum(_normed(name, norm, linears, hidden) for name, norm in module.named_children())
    choices = num_chosen(model.config.to_dict()) if experts else 0
    width += choices * sum(map(_experts, experts))
    routed = _ROUTER * sum(module.num_experts for module in experts)
    kept: int = dtype.itemsize * width + _FP32 * normed + routed + workspace_bytes(model, dtype)
    return kept


def trained_width(model: Any, targets: Collection[str]) -> int:
    """Numbers that are kept of a row besides, with adapters at these paths of experts and of linears that `all-linear`
    leaves out: what enters them."""
    if not targets:
        return 0
    trained = {path.rpartition(".")[0] for path in targets}
    products = (_products(module) for path, module in experts_of(model).items() if path in trained)
    width = sum(first.in_features + down.in_features for first, down in products)
    others: int = sum(module.in_features for path, module in model.named_modules() if path in targets)
    return others + (num_chosen(model.config.to_dict()) * width if width else 0)


def _inputs(linears: Mapping[str, SlotLinear], joining: SlotLinear) -> int:
    read = {linear.in_features for linear in linears.values() if linear is not joining}
    return sum(read) + (joining.in_features if joining in linears.values() else 0)


def _outputs(linears: Mapping[str, SlotLinear], joining: SlotLinear, hidden: int, *, has_margin: bool) -> int:
    kept = [linear for linear in linears.values() if has_margin or linear is not joining]
    # A gate of width 1 keeps what it multiplies.
    gated = hidden * sum(linear.out_features == 1 for linear in linears.values())
    return gated + sum(linear.share.shape[0] for linear in kept)


def _attention(module: Any, linears: dict[str, SlotLinear], joining: SlotLinear, dtype: torch.dtype) -> int:
    """Numbers besides inputs and outputs of the linears."""
    if not hasattr(module, "num_key_value_groups") or not {"o_proj", "out_proj"} & set(linears):
        return 0
    width, heads = joining.in_features, module.config.num_attention_heads
    counted = sum(linear.out_features for linear in linears.values() if linear is not joining)
    # A gate comes with the queries, and the output is kept before it, too.
    gated = width if "q_proj" in linears and linears["q_proj"].out_features == 2 * width else 0
    has_sinks, softcap = hasattr(module, "sinks"), getattr(module, "attn_logit_softcapping", None)
    if dtype is torch.float32 or width > _WIDEST_HEAD * heads or has_sinks or softcap is not None:
        sinks = 2 * SINK_NUMBERS * heads if has_sinks else 0
        return sinks + gated + max(gated + 4 * width - counted, width)
    # Values made of keys are a copy.
    return gated + (linears["k_proj"].out_features if "k_proj" in linears and "v_proj" not in linears else 0)


def _activation(module: Any, linears: dict[str, SlotLinear], *, has_margin: bool) -> int:
    has_own = any(hasattr(module, name) for name in ("act_fn", "activation_fn", "activation", "act"))
    if not has_own and "MLP" not in type(module).__name__:
        return 0
    *others, last = linears.values()
    is_multiplied = sum(linear.out_features for linear in others) > last.in_features
    return last.in_features if is_multiplied or has_margin else 0


def _normed(name: str, norm: nn.Module, linears: dict[str, SlotLinear], hidden: int) -> int:
    """Numbers that a norm keeps of a row; those of heads norm a linear's output of the same name."""
    if "Norm" not in type(norm).__name__:
        return 0
    own = linears.get(f"{name.split('_')[0]}_proj")
    if own is not None:
        # Without the gate that comes with the queries.
        return min(own.out_features, linears["o_proj"].in_features) if "o_proj" in linears else own.out_features
    weight = getattr(norm, "weight", None)
    return hidden if weight is None else weight.numel()


def _products(module: Any) -> tuple[ExpertSite, ExpertSite]:
    first, down = (next(iter(sites.values())) for sites in sites_of(module).values())
    return first, down


def _experts(module: Any) -> int:
    """Numbers of one choice."""
    first, down = _products(module)
    # Gates that take turns with what they multiply are copied apart.
    between = 0 if not module.has_gate else 1 if module.is_concatenated else 4
    return first.out_features + between * down.in_features + down.out_features
