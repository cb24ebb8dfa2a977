"""A small trained head of a job: logits of L labels from hidden states, beside the adapter and stepped with it.

It is what transformers' models for classification call `score` and what PEFT keeps as a module to save. Shape suffixes:
L labels, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.adapters.part import PartShape
from weft.adapters.sample_sums import AnyOrderSums

HEAD = "score"
"""Its name as a module, as a group of parameters, and in PEFT's files."""
INITIAL_STD = 0.02
"""Of its starting values; transformers' initializer_range."""


@dataclass(frozen=True)
class HeadShape(PartShape):
    """How large a head is."""

    num_labels: int
    width: int
    """D of the hidden states."""
    has_bias: bool

    @property
    def tensor_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the weight and, where there is one, the bias."""
        return ((self.num_labels, self.width), *(((self.num_labels,),) if self.has_bias else ()))

    def initial(self, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """Starting values: normal weights and no bias, as transformers has them."""
        weight_LD = torch.randn(self.num_labels, self.width, generator=generator) * INITIAL_STD
        return (weight_LD, *((torch.zeros(self.num_labels),) if self.has_bias else ()))


@dataclass(frozen=True, eq=False)
class HeadWeights:
    """The tensors of a head, and their gradients: views of its adapter's buffers."""

    params: tuple[torch.Tensor, ...]
    grads: tuple[torch.Tensor, ...]
    any_order_sums: AnyOrderSums | None = None

    def logits(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        """(B, L) in fp32."""
        return torch.nn.functional.linear(hidden_BD.float(), *self.params)

    def input_gradient(self, slopes_BL: torch.Tensor) -> torch.Tensor:
        """The gradient of the hidden states (B, D)."""
        return slopes_BL @ self.params[0]

    def add_gradients(self, hidden_ND: torch.Tensor, slopes_NL: torch.Tensor) -> None:
        """Adds those of one sample's rows."""
        self.grads[0].add_(slopes_NL.t() @ hidden_ND.float())
        if len(self.grads) > 1:
            self.grads[1].add_(slopes_NL.sum(dim=0))
        if self.any_order_sums is not None:
            self.any_order_sums.take_sample()
