"""The output head and the cross entropy of supervised rows, in blocks, with the gradient made on the way.

Per supervised row n with hidden state h_n, target t_n and weight w_n:
    x = h Wᵀ,   z = cap · tanh(x / cap)   (no cap: z = x),   loss_n = logsumexp(z) - z[t]
    hit_n = 1 if x[t] ≥ max x and loss_n is a number, else 0
    dh_n = w_n · (softmax(z) - onehot(t)) · dz/dlogits · W
All logits never exist at once. Rows only ever meet the frozen W, so a NaN row stays one row.
Shape suffixes: N supervised rows, B rows of a block, D hidden size, V vocabulary; 2: losses, then hits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

BLOCK = 128
"""Rows per block: fixed, so that a row's result does not depend on how many others there are."""


@dataclass(frozen=True)
class Head:
    """The frozen output head."""

    weight_VD: torch.Tensor
    bias_V: torch.Tensor | None = None
    softcap: float | None = None

    def logits(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        """(B, V) in fp32, after the soft cap."""
        return self.capped(self.raw_logits(hidden_BD))

    def raw_logits(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        """(B, V) in fp32, before the soft cap."""
        raw_BV = hidden_BD @ self.weight_VD.t()
        if self.bias_V is not None:
            raw_BV = raw_BV + self.bias_V
        return raw_BV.float()

    def capped(self, raw_BV: torch.Tensor) -> torch.Tensor:
        """Raw logits after the soft cap, if there is one."""
        return raw_BV if self.softcap is None else torch.tanh(raw_BV / self.softcap) * self.softcap


def head_of(model: Any) -> Head:
    """The frozen output head of a transformers model."""
    module = model.get_output_embeddings()
    return Head(module.weight, getattr(module, "bias", None), getattr(model.config, "final_logit_softcapping", None))


def cross_entropy(
    hidden_ND: torch.Tensor, targets_N: torch.Tensor, weights_N: torch.Tensor | None, head: Head
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Loss (unweighted) and hit of every row (2, N, fp32) and, given weights, the weighted sum's gradient (N, D)."""
    num_rows = hidden_ND.shape[0]
    results_2N = torch.empty(2, num_rows, device=hidden_ND.device)
    grad_ND = None if weights_N is None else torch.empty_like(hidden_ND)
    for start in range(0, num_rows, BLOCK):
        end = min(start + BLOCK, num_rows)
        count = end - start
        block_BD = hidden_ND.new_zeros(BLOCK, hidden_ND.shape[1])
        block_BD[:count] = hidden_ND[start:end]
        logits_BV = head.raw_logits(block_BD)
        targets_B1 = torch.zeros(BLOCK, 1, dtype=targets_N.dtype, device=targets_N.device)
        targets_B1[:count, 0] = targets_N[start:end]
        is_top_B1 = logits_BV.gather(1, targets_B1) >= logits_BV.amax(dim=1, keepdim=True)
        logits_BV = head.capped(logits_BV)
        norm_B1 = torch.logsumexp(logits_BV, dim=1, keepdim=True)
        losses_B1 = norm_B1 - logits_BV.gather(1, targets_B1)
        hits_B1 = is_top_B1 & ~losses_B1.isnan()
        results_2N[:, start:end] = torch.cat((losses_B1, hits_B1.float()), dim=1)[:count].t()
        if grad_ND is None or weights_N is None:
            continue
        dz_BV = torch.exp(logits_BV - norm_B1)
        dz_BV.scatter_add_(1, targets_B1, dz_BV.new_full((BLOCK, 1), -1.0))
        if head.softcap is not None:
            dz_BV *= 1 - (logits_BV / head.softcap) ** 2
        weights_B1 = weights_N.new_zeros(BLOCK, 1)
        weights_B1[:count, 0] = weights_N[start:end]
        dz_BV *= weights_B1
        grad_ND[start:end] = (dz_BV.to(hidden_ND.dtype) @ head.weight_VD)[:count]
    return results_2N, grad_ND
