"""The output head and the cross entropy of supervised rows, in blocks, with the gradient made on the way.

Per supervised row n with hidden state h_n, target t_n and weight w_n:
    x = s · h Wᵀ   (no scale: s = 1),   z = cap · tanh(x / cap)   (no cap: z = x)
    loss_n = logsumexp(z) - z[t]
    hit_n = 1 if x[t] ≥ max x and loss_n is a number, else 0
    dh_n = s · w_n · (softmax(z) - onehot(t)) · dz/dlogits · W
All logits never exist at once; what becomes of a block of them is said in kernels/layers/cross_entropy.py. Rows only
ever meet the frozen W, so a NaN row stays one row. Shape suffixes: N supervised rows, B rows of a block, D hidden size,
V vocabulary; 2: losses, then hits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from weft.kernels.layers.cross_entropy import cross_entropy_rows_reference
from weft.plan.families.registry import logit_scale

BLOCK = 128
"""Rows of a block where nothing speaks for more."""

RowLosses = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, float | None], torch.Tensor]
"""Logits, targets, weights and soft cap to losses and hits; given weights, the logits become their gradient."""


@dataclass(frozen=True)
class Head:
    """The frozen output head."""

    weight_VD: torch.Tensor
    bias_V: torch.Tensor | None = None
    softcap: float | None = None
    scale: float | None = None
    """What the logits are multiplied by."""

    def logits(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        """(B, V) in fp32, after the soft cap."""
        return self.capped(self.linear(hidden_BD))

    def capped(self, raw_BV: torch.Tensor) -> torch.Tensor:
        """What `linear` gave, in fp32, after the soft cap."""
        raw_BV = raw_BV.float()
        return raw_BV if self.softcap is None else torch.tanh(raw_BV / self.softcap) * self.softcap

    def uncapped(self, grad_BV: torch.Tensor, logits_BV: torch.Tensor) -> torch.Tensor:
        """The gradient of what `linear` makes, from that of the logits."""
        return grad_BV if self.softcap is None else grad_BV * (1 - (logits_BV / self.softcap) ** 2)

    def linear(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        """(B, V) in the type of the hidden states, before the soft cap."""
        raw_BV = hidden_BD @ self.weight_VD.t()
        if self.bias_V is not None:
            raw_BV.add_(self.bias_V)
        return raw_BV if self.scale is None else raw_BV.mul_(self.scale)

    def input_gradient(self, grad_BV: torch.Tensor) -> torch.Tensor:
        """The gradient of the hidden states (B, D) from that of `linear`."""
        grad_BD = grad_BV @ self.weight_VD
        return grad_BD if self.scale is None else grad_BD.mul_(self.scale)


def head_of(model: Any) -> Head:
    """The frozen output head of a transformers model."""
    module, config = model.get_output_embeddings(), model.config.get_text_config()
    softcap = getattr(config, "final_logit_softcapping", None)
    return Head(module.weight, getattr(module, "bias", None), softcap, logit_scale(config.model_type, vars(config)))


@dataclass(frozen=True)
class BlockedLoss:
    """The cross entropy of hidden states behind a head, a block of rows at a time."""

    head: Head
    block: int = BLOCK
    """Rows whose logits exist at once: fixed, so that a row's result does not depend on how many others there are."""
    row_losses: RowLosses = cross_entropy_rows_reference
    """What is done with a block's logits: the plain twin, or the kernel where there is one."""

    def among(self, rows: np.ndarray) -> BlockedLoss:
        """The loss of some of a microbatch's rows: all have the same head."""
        return self

    @torch.no_grad()
    def __call__(
        self, hidden_ND: torch.Tensor, targets_N: torch.Tensor, weights_N: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Unweighted loss and hit of every row (2, N, fp32) and, given weights, the weighted sum's gradient (N, D)."""
        num_rows = hidden_ND.shape[0]
        results_2N = torch.empty(2, num_rows, device=hidden_ND.device)
        grad_ND = None if weights_N is None else torch.empty_like(hidden_ND)
        for start in range(0, num_rows, self.block):
            end = min(start + self.block, num_rows)
            fill = self.block - (end - start)
            logits_BV = self.head.linear(F.pad(hidden_ND[start:end], (0, 0, 0, fill)))
            targets_B = F.pad(targets_N[start:end], (0, fill))
            weights_B = None if weights_N is None else F.pad(weights_N[start:end], (0, fill))
            results_2B = self.row_losses(logits_BV, targets_B, weights_B, self.head.softcap)
            results_2N[:, start:end] = results_2B[:, : end - start]
            if grad_ND is not None:
                grad_ND[start:end] = self.head.input_gradient(logits_BV)[: end - start]
        return results_2N, grad_ND
