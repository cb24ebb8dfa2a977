"""The output head, the cross entropy of supervised rows and distillation, in blocks, with the gradient made on the way.

Per supervised row n with hidden state h_n, target t_n and weight w_n:
    x = s · h Wᵀ   (no scale: s = 1),   z = cap · tanh(x / cap)   (no cap: z = x)
    loss_n = logsumexp(z) - z[t]
    hit_n = 1 if x[t] ≥ max x and loss_n is a number, else 0
    dh_n = s · w_n · (softmax(z) - onehot(t)) · dz/dlogits · W
All logits never exist at once; kernels/layers/cross_entropy.py turns a block of them into losses and gradients. Blocks
have a fixed size, so that a row's result does not depend on how many others there are, and rows only ever meet the
frozen W, so a NaN stays in its row.

In distillation a teacher describes a row by its last hidden state, which goes through the same output head, or by its
most likely tokens. Nothing waits for the device.

Shape suffixes: T rows of the microbatch, N supervised rows, B rows of a block, D hidden size, V vocabulary, K tokens of
a teacher, or numbers that are measured; 2: losses, then hits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from weft.kernels.device import is_gpu
from weft.kernels.device_event import sent
from weft.kernels.layers.cross_entropy import cross_entropy_rows
from weft.model.objective_loss import ReferenceRows
from weft.objectives.distillation import MEASURED, Distillation
from weft.plan.cost.memory import LOSS_ROWS
from weft.plan.families import logit_scale

BLOCK = 128
"""Rows of a block on a CPU."""


@dataclass(frozen=True)
class Head:
    weight_VD: torch.Tensor
    bias_V: torch.Tensor | None = None
    softcap: float | None = None
    scale: float | None = None

    def logits(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        return self.capped(self.linear(hidden_BD))

    def raw_logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """`linear` of any number of rows, on a GPU with the bits that each row has in a block of the loss."""
        if not is_gpu(hidden_ND.device):
            return self.linear(hidden_ND)
        parts = [
            self.linear(F.pad(part_BD, (0, 0, 0, _block_for(self, len(part_BD)) - len(part_BD))))[: len(part_BD)]
            for part_BD in hidden_ND.split(LOSS_ROWS)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def capped(self, raw_BV: torch.Tensor) -> torch.Tensor:
        raw_BV = raw_BV.float()
        return raw_BV if self.softcap is None else torch.tanh(raw_BV / self.softcap) * self.softcap

    def uncapped(self, grad_BV: torch.Tensor, logits_BV: torch.Tensor) -> torch.Tensor:
        """The gradient of the output of `linear`, from that of the logits."""
        return grad_BV if self.softcap is None else grad_BV * (1 - (logits_BV / self.softcap) ** 2)

    def linear(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        """Logits (B, V) in the type of the hidden states, before the soft cap."""
        raw_BV = hidden_BD @ self.weight_VD.t()
        if self.bias_V is not None:
            raw_BV.add_(self.bias_V)
        return raw_BV if self.scale is None else raw_BV.mul_(self.scale)

    def input_gradient(self, grad_BV: torch.Tensor) -> torch.Tensor:
        """The gradient of the hidden states (B, D) from that of `linear`."""
        grad_BD = grad_BV @ self.weight_VD
        return grad_BD if self.scale is None else grad_BD.mul_(self.scale)


def _block_for(head: Head, num_rows: int) -> int:
    """The least number of rows, at least as many, whose product has the bits of a block of the loss."""
    weight = head.weight_VD
    sizes = [size for size in (64, 128, 256) if size >= num_rows]
    return next((size for size in sizes if _agrees(size, weight.shape, weight.dtype, weight.device)), LOSS_ROWS)


@lru_cache(maxsize=64)
def _agrees(num_rows: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a GPU's library adds up as many rows as it does a block of the loss."""
    generator = torch.Generator(device).manual_seed(0)
    weight_VD = torch.randn(shape, dtype=dtype, device=device, generator=generator)
    rows_BD = torch.randn(LOSS_ROWS, shape[1], dtype=dtype, device=device, generator=generator)
    return torch.equal(rows_BD[:num_rows] @ weight_VD.t(), (rows_BD @ weight_VD.t())[:num_rows])


def head_of(model: Any) -> Head:
    module, config = model.get_output_embeddings(), model.config.get_text_config()
    softcap = getattr(config, "final_logit_softcapping", None)
    return Head(module.weight, getattr(module, "bias", None), softcap, logit_scale(config.model_type, vars(config)))


@dataclass(frozen=True)
class BlockedLoss:
    """The cross entropy of hidden states after a head, a block of rows at a time."""

    head: Head

    @property
    def block(self) -> int:
        """Number of rows whose logits exist at once: fixed, so no row's result depends on the others."""
        return LOSS_ROWS if is_gpu(self.head.weight_VD.device) else BLOCK

    def among(self, rows: np.ndarray) -> BlockedLoss:
        """The loss of some of a microbatch's rows: the same, since all have one head."""
        return self

    @torch.no_grad()
    def __call__(
        self, hidden_ND: torch.Tensor, targets_N: torch.Tensor, weights_N: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        num_rows = hidden_ND.shape[0]
        results_2N = torch.empty(2, num_rows, device=hidden_ND.device)
        grad_ND = None if weights_N is None else torch.empty_like(hidden_ND)
        for start in range(0, num_rows, self.block):
            end = min(start + self.block, num_rows)
            fill = self.block - (end - start)
            logits_BV = self.head.linear(F.pad(hidden_ND[start:end], (0, 0, 0, fill)))
            targets_B = F.pad(targets_N[start:end], (0, fill))
            weights_B = None if weights_N is None else F.pad(weights_N[start:end], (0, fill))
            results_2B = cross_entropy_rows(logits_BV, targets_B, weights_B, self.head.softcap)
            results_2N[:, start:end] = results_2B[:, : end - start]
            if grad_ND is not None:
                grad_ND[start:end] = self.head.input_gradient(logits_BV)[: end - start]
        return results_2N, grad_ND


DISTILL_BLOCK = 64
"""Number of rows whose logits exist at once: about eight times in fp32, no more than a block of cross entropy."""


@dataclass(frozen=True, eq=False)
class DistillationRows:
    objective: Distillation
    rows: np.ndarray
    """Indices among all rows of the microbatch (N)."""
    targets: np.ndarray
    shares: np.ndarray
    """Weight of each row in its job's loss: 1 / divisor of the global batch (N, float32)."""
    segments: np.ndarray
    teacher: tuple[ReferenceRows, ...]


@dataclass(frozen=True, eq=False)
class DistillationPass:
    segments: np.ndarray
    measured_KN: torch.Tensor
    """Values of `MEASURED`, in its order."""


@torch.no_grad()
def run_distillation(
    head: Head, hidden_TD: torch.Tensor, batch: Sequence[DistillationRows], grad_TD: torch.Tensor | None = None
) -> list[DistillationPass]:
    """Metrics of all taught rows; given the gradient of the hidden states, adds theirs to it."""
    found = []
    for taught in batch:
        rows_N, targets_N, shares_N = (
            sent(torch.from_numpy(each), hidden_TD.device) for each in (taught.rows, taught.targets, taught.shares)
        )
        teacher = tuple(torch.cat(parts) for parts in zip(*(each.values for each in taught.teacher), strict=True))
        measured_KN = torch.empty(len(MEASURED), len(rows_N), device=hidden_TD.device)
        for start in range(0, len(rows_N), DISTILL_BLOCK):
            block = slice(start, min(start + DISTILL_BLOCK, len(rows_N)))
            raw_BV = head.linear(_padded(hidden_TD[rows_N[block]]))
            logits_BV = head.capped(raw_BV)
            teacher_BV = _teacher_logits(head, [_padded(part[block]) for part in teacher], logits_BV)
            result = taught.objective.distillation_loss(logits_BV, teacher_BV, _padded(targets_N[block]))
            num_rows = block.stop - start
            measured_KN[:, block] = torch.stack(result.measured_KB)[:, :num_rows]
            if grad_TD is not None:
                slopes_BV = result.slopes_BV * _padded(shares_N[block])[:, None]
                grad_BD = head.input_gradient(head.uncapped(slopes_BV, logits_BV).to(raw_BV.dtype))
                grad_TD.index_copy_(0, rows_N[block], grad_BD[:num_rows])
        found.append(DistillationPass(taught.segments, measured_KN))
    return found


def top_tokens(head: Head, hidden_ND: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids (N, K, int32) of each row's most likely tokens and their log-probabilities (fp32), the most likely first."""
    ids, logprobs = [], []
    for start in range(0, len(hidden_ND), DISTILL_BLOCK):
        piece_BD = hidden_ND[start : start + DISTILL_BLOCK]
        logs_BV = head.logits(_padded(piece_BD)).log_softmax(dim=1)[: len(piece_BD)]
        values_BK, ids_BK = logs_BV.topk(number, dim=1)
        ids.append(ids_BK.int())
        logprobs.append(values_BK)
    return torch.cat(ids), torch.cat(logprobs)


def _teacher_logits(head: Head, values: Sequence[torch.Tensor], like_BV: torch.Tensor) -> torch.Tensor:
    if len(values) == 1:
        return head.logits(values[0])
    ids_BK, logprobs_BK = values
    return torch.full_like(like_BV, -torch.inf).scatter_(1, ids_BK.long(), logprobs_BK)


def _padded(values: torch.Tensor) -> torch.Tensor:
    return F.pad(values, (0, 0) * (values.dim() - 1) + (0, DISTILL_BLOCK - len(values)))
