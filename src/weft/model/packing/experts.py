"""Frozen experts on packed samples: a row's result depends on that row alone.

A router sends each row to K experts, so how many rows an expert multiplies depends on the neighbours, and with the
number of rows the last bits of a product. Here every expert's rows fill whole blocks of a fixed size. A row's K results
are added one after the other, in the router's order.

Shape suffixes: T rows of the microbatch, K choices of a row, S = T · K, P places (the rows of all blocks), D hidden
size, E experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from weft.adapters.routing import Routing
from weft.kernels.device import is_cpu

NAME = "weft_packed"
_IN_FILES = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Names of one expert's linears in files and in other trainers."""
BLOCK = 32
"""Rows of a block: with many experts each has few rows, and larger blocks would be mostly padding."""


def choose(model: Any, implementation: str) -> None:
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(NAME, packed_experts)
    if any(_are_experts(module) for module in model.modules()):
        model.set_experts_implementation(implementation)


def prepare(model: Any, routing: Routing) -> None:
    """Makes a model use the experts here, and gives its routers the rows of one tile at a time."""
    choose(model, NAME)
    for holder in model.modules():
        if not any(_are_experts(child) for child in holder.children()):
            continue
        for router in holder.children():
            if not (isinstance(router, nn.Linear) or _are_experts(router)) and any(
                p.ndim == 2 for p in router.parameters(recurse=False)
            ):
                object.__setattr__(router, "forward", functools.partial(_by_tiles, router.forward, routing))


def expert_weights(model: nn.Module) -> list[str]:
    """Paths of all weights of experts, in the model and in its files."""
    found = [(path, module) for path, module in model.named_modules() if _are_experts(module)]
    own = [f"{path}.{name}" for path, module in found for name, _ in module.named_parameters(recurse=False)]
    return [*own, *(f"{path}.0.{name}" for path, _ in found for name in _IN_FILES)]


def _are_experts(module: nn.Module) -> bool:
    has_experts_code = hasattr(module, "has_gate") and hasattr(module, "is_transposed")
    return has_experts_code and any(parameter.ndim == 3 for parameter in module.parameters(recurse=False))


def _by_tiles(forward: Callable[..., Any], routing: Routing, hidden: torch.Tensor, *rest: Any) -> Any:
    rows_TD = hidden.reshape(-1, hidden.shape[-1])
    if routing.row_tile is None or len(rows_TD) == routing.row_tile:
        return forward(hidden, *rest)
    answers = [forward(tile_LD, *rest) for tile_LD in rows_TD.split(routing.row_tile)]
    if isinstance(answers[0], torch.Tensor):
        return torch.cat(answers)
    return tuple(torch.cat(parts) for parts in zip(*answers, strict=True))


def packed_experts(
    module: Any, hidden_TD: torch.Tensor, index_TK: torch.Tensor, weights_TK: torch.Tensor
) -> torch.Tensor:
    """The weighted sum of the outputs of each row's experts, (T, D)."""
    num_rows, num_choices = index_TK.shape
    index_S, blocks_E = _block_indices(index_TK.flatten(), module.num_experts)
    # Stacked, not repeated: on the way back the K gradients of a row are added one after the other too.
    x_SD = torch.stack([hidden_TD] * num_choices, dim=1).flatten(0, 1)
    x_PD = x_SD.new_zeros(sum(blocks_E) * BLOCK, x_SD.shape[1]).index_copy(0, index_S, x_SD)
    y_PD = _run(module, x_PD, blocks_E)
    y_TKD = y_PD[index_S].view(num_rows, num_choices, -1) * weights_TK[..., None]
    total_TD = y_TKD[:, 0]
    for choice in range(1, num_choices):
        total_TD = total_TD + y_TKD[:, choice]
    return total_TD.to(hidden_TD.dtype)


def _block_indices(expert_S: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, list[int]]:
    """Index of each choice of a row in the blocks of all experts, and the number of blocks of each expert."""
    counts_E = torch.bincount(expert_S, minlength=num_experts)
    blocks_E = (counts_E + BLOCK - 1) // BLOCK
    first_E = (blocks_E.cumsum(0) - blocks_E) * BLOCK
    order_S = torch.argsort(expert_S, stable=True)
    sorted_S = expert_S[order_S]
    rank_S = torch.arange(len(expert_S), device=expert_S.device) - (counts_E.cumsum(0) - counts_E)[sorted_S]
    index_S = torch.empty_like(order_S)
    index_S[order_S] = first_E[sorted_S] + rank_S
    return index_S, blocks_E.tolist()


def _run(module: Any, x_PD: torch.Tensor, blocks_E: list[int]) -> torch.Tensor:
    up = "gate_up_proj" if module.has_gate else "up_proj"
    h_PJ = _products(module, up, x_PD, blocks_E)
    h_PJ = module._apply_gate(h_PJ) if module.has_gate else module.act_fn(h_PJ)
    y_PD = _products(module, "down_proj", h_PJ, blocks_E)
    # transformers 5.17 knows no norms of experts.
    return module.post_expert_norm(y_PD) if getattr(module, "has_post_expert_norm", False) else y_PD


def _products(module: Any, name: str, x_PD: torch.Tensor, blocks_E: list[int]) -> torch.Tensor:
    """Each expert's rows times its weight of that name, with its bias; on a CPU block by block."""
    weights = getattr(module, name)
    biases = getattr(module, f"{name}_bias") if module.has_bias else None
    outputs = []
    for expert, rows_LD in enumerate(x_PD.split([blocks * BLOCK for blocks in blocks_E])):
        if not len(rows_LD):
            continue
        weight = weights[expert].t() if module.is_transposed else weights[expert]
        bias = None if biases is None else biases[expert]
        parts = rows_LD.split(BLOCK) if is_cpu(x_PD.device) else (rows_LD,)
        outputs += [F.linear(part, weight, bias) for part in parts]
    return torch.cat(outputs)
