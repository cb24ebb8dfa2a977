"""Tensors of an adapter of any method at the sites of a backbone, as kernels read them, besides LoRA's `Entry`.

All tensors are contiguous, fp32 unless stated otherwise, and are not moved while the adapter has its slot.

Shape suffixes: N numbers of a row, W width of a bottleneck, V virtual tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

Elementwise = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Activation:
    number: int
    """Number in kernels; 0 is none."""
    apply: Elementwise
    derivative: Elementwise


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return (torch.tanh(x * 0.5) + 1.0) * 0.5


def _silu_derivative(x: torch.Tensor) -> torch.Tensor:
    share = _sigmoid(x)
    return share * (1.0 + x * (1.0 - share))


def _normal_share(x: torch.Tensor) -> torch.Tensor:
    """The fraction of a normal distribution below x."""
    return (torch.erf(x * math.sqrt(0.5)) + 1.0) * 0.5


def _gelu_derivative(x: torch.Tensor) -> torch.Tensor:
    density = torch.exp(x * x * -0.5) * (1.0 / math.sqrt(2.0 * math.pi))
    return _normal_share(x) + x * density


def _tanh_derivative(x: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(x)
    return 1.0 - y * y


ACTIVATIONS: dict[str, Activation] = {
    "relu": Activation(1, lambda x: x.clamp(min=0.0), lambda x: (x > 0).float()),
    "gelu": Activation(2, lambda x: x * _normal_share(x), _gelu_derivative),
    "silu": Activation(3, lambda x: x * _sigmoid(x), _silu_derivative),
    "tanh": Activation(4, torch.tanh, _tanh_derivative),
}


@dataclass(frozen=True)
class ColumnChange:
    """A row x of a site becomes factor ⊙ x + shift; None leaves that part out."""

    factor_N: torch.Tensor | None = None
    shift_N: torch.Tensor | None = None
    grad_factor_N: torch.Tensor | None = None
    """Receives Σ dy ⊙ x."""
    grad_shift_N: torch.Tensor | None = None
    """Receives Σ dy."""

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self.factor_N, self.shift_N, self.grad_factor_N, self.grad_shift_N


@dataclass(frozen=True)
class InnerChange:
    """S of a site becomes f(S + bias) before it is expanded."""

    bias_W: torch.Tensor
    grad_bias_W: torch.Tensor
    activation: Activation


@dataclass(frozen=True)
class LeadingRows:
    rows_VN: torch.Tensor
    grad_VN: torch.Tensor


@dataclass(frozen=True)
class SparsePart:
    """A weight (out, in) changes on some positions: (outputs_V, inputs_V), ascending, first by outputs."""

    outputs_V: torch.Tensor
    """int32, like all indices here."""
    inputs_V: torch.Tensor
    values_V: torch.Tensor
    grad_V: torch.Tensor
    out_starts: torch.Tensor
    """First position of each output, and the number of positions."""
    in_starts: torch.Tensor
    """The same for each input, with positions sorted by inputs."""
    in_outputs_V: torch.Tensor
    in_values_V: torch.Tensor
    """The values in that order: a copy."""
    about: torch.Tensor = field(init=False)
    """Description that kernels read: addresses, and the number of positions."""

    def __post_init__(self) -> None:
        by_out = (self.out_starts, self.inputs_V, self.values_V)
        by_in = (self.in_starts, self.in_outputs_V, self.in_values_V)
        tensors = (*by_out, *by_in, self.outputs_V, self.grad_V)
        numbers = [*(tensor.data_ptr() for tensor in tensors), self.values_V.numel()]
        object.__setattr__(self, "about", torch.tensor(numbers, device=self.values_V.device))


Key = TypeVar("Key")


@dataclass(frozen=True)
class OtherParts(Generic[Key]):
    outputs: Mapping[Key, ColumnChange] = field(default_factory=dict)
    """Changes of a linear's outputs or, after a bottleneck, of the block's outputs."""
    inputs: Mapping[Key, ColumnChange] = field(default_factory=dict)
    """Changes of the inputs of a linear that shares them with no other one."""
    inner: Mapping[Key, InnerChange] = field(default_factory=dict)
    rows: Mapping[Key, LeadingRows] = field(default_factory=dict)
    sparse: Mapping[Key, SparsePart] = field(default_factory=dict)

    def numbered(self, numbers: Mapping[Key, int]) -> OtherParts[int]:
        return OtherParts(
            {numbers[key]: part for key, part in self.outputs.items()},
            {numbers[key]: part for key, part in self.inputs.items()},
            {numbers[key]: part for key, part in self.inner.items()},
            {numbers[key]: part for key, part in self.rows.items()},
            {numbers[key]: part for key, part in self.sparse.items()},
        )


NO_OTHERS: OtherParts[int] = OtherParts()
