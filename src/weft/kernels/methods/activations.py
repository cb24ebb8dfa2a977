"""The non-linearities of a bottleneck, each with its derivative.

They consist of sums, products, tanh, erf and exp alone. On a CPU, some functions such as sigmoid compute the last
numbers of a tensor by other code than the rest, so that a row's bits would depend on its position in a window; in these
they do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

Elementwise = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Activation:
    """A function of single numbers and its derivative, both for fp32."""

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
"""Functions by the value of `bottleneck_activation`."""
