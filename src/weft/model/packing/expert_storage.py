"""The frozen weights of a layer's experts, dense or as 8-bit floats that lose nothing.

    w[e, d, o] = w8[e, d, o] · 2 ** k[e, o]        k such that the largest number of a column is 256 or 384 in w8

Numbers of MXFP4 are 0, ½, 1, 1½, 2, 3, 4 or 6 times a power of two for each block of 32. They are numbers of w8 if
those powers span at most 14 octaves in a column: 384 is 6 · 2 ** 6, and 2 ** -9, the smallest of w8, is ½ · 2 ** -8.
A product makes its weights dense, and again on the way back.

Shape suffixes: E experts, D inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weft.errors import ModelError
from weft.settings import DOWN, GATE_UP, UP

_SCALE = "weft_scale"
_TOP = 8
"""Exponent of the largest number of a column in w8."""


@dataclass(frozen=True)
class ExpertWeight:
    stored: torch.Tensor
    scale_EO: torch.Tensor | None
    """Powers of two, in the type of the activations; None: stored dense."""
    is_transposed: bool
    """True if it is stored (E, D, O), not (E, O, D)."""

    @classmethod
    def of(cls, module: Any, name: str) -> ExpertWeight:
        return cls(getattr(module, name), getattr(module, f"{name}_{_SCALE}", None), module.is_transposed)

    def dense(self) -> torch.Tensor:
        """(E, D, O)"""
        w_EDO = self.stored if self.is_transposed else self.stored.transpose(1, 2)
        return w_EDO if self.scale_EO is None else w_EDO.to(self.scale_EO.dtype) * self.scale_EO[:, None]


def store_experts(model: nn.Module, where: str) -> None:
    """Stores the experts of a model as 8-bit floats; ModelError if a number would change."""
    for path, module in model.named_modules():
        if not (hasattr(module, "has_gate") and hasattr(module, "is_transposed")):
            continue
        for name in (GATE_UP, UP, DOWN):
            weight = getattr(module, name, None)
            if not isinstance(weight, nn.Parameter) or weight.ndim != 3:
                continue
            dense_EDO = ExpertWeight.of(module, name).dense()
            w8, scale_EO = _in_eight_bits(weight.detach(), module.is_transposed)
            setattr(module, name, nn.Parameter(w8, requires_grad=False))
            module.register_buffer(f"{name}_{_SCALE}", scale_EO, persistent=False)
            if not torch.equal(ExpertWeight.of(module, name).dense(), dense_EDO):
                raise ModelError(
                    f"{path}.{name} spans more than 14 octaves for one output, which fp8 cannot hold; set quantize to "
                    "none.",
                    where=where,
                )


def _in_eight_bits(weight: torch.Tensor, is_transposed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    dim = 1 if is_transposed else 2
    largest_EO = weight.abs().amax(dim).float()
    exponents_EO = torch.frexp(torch.where(largest_EO > 0, largest_EO, 1.0)).exponent - 1 - _TOP
    scale_EO = torch.ldexp(torch.ones_like(largest_EO), exponents_EO)
    return (weight.float() / scale_EO.unsqueeze(dim)).to(torch.float8_e4m3fn), scale_EO.to(weight.dtype)
