"""The modules of a model that adapters can sit on: those that multiply rows by a frozen weight and add a bias."""

from __future__ import annotations

from typing import Any

from torch import nn

_LINEAR = ("Linear", "FalconLinear")
_TRANSPOSED = ("Conv1D",)
"""GPT-2's linears store their weight as (in, out)."""


def linear_modules(model: Any) -> dict[str, nn.Linear]:
    """Every linear of a transformers model but its output head, by path.

    One that stores its weight the other way round comes as a linear whose weight is a view of it: writing to that
    writes to the model.
    """
    head = model.get_output_embeddings()
    found = {path: _as_linear(module) for path, module in model.named_modules() if module is not head}
    return {path: linear for path, linear in found.items() if linear is not None}


def _as_linear(module: nn.Module) -> nn.Linear | None:
    kind = type(module).__name__
    if kind in _LINEAR:
        assert isinstance(module, nn.Linear)
        return module
    if kind not in _TRANSPOSED:
        return None
    weight_DO, bias_O = module.get_parameter("weight"), module.get_parameter("bias")
    linear = nn.Linear(weight_DO.shape[0], weight_DO.shape[1], device="meta")
    linear.weight = nn.Parameter(weight_DO.detach().t(), requires_grad=False)
    linear.bias = nn.Parameter(bias_O.detach(), requires_grad=False)
    return linear
