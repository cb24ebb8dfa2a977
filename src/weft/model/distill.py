"""Rows that learn from a teacher: both distributions block by block, the losses, and the gradient of the hidden states.

The teacher speaks of a row by its last hidden state, which goes through the same output head, or by its most likely
tokens. All logits never exist at once: blocks have a fixed size, so that a row's result does not depend on how many
others there are. Rows only ever meet the frozen head, so a NaN stays in its row. Nothing waits for the device. Shape
suffixes: T rows of the microbatch, N rows that learn, B rows of a block, D hidden size, V vocabulary, K tokens that the
teacher names, or numbers that are measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from weft.kernels.device_event import sent
from weft.model.loss import Head
from weft.model.reference_rows import ReferenceRows
from weft.objectives.distillation import MEASURED, Distillation

BLOCK = 64
"""Rows whose logits exist at once: some eight times in fp32, which takes no more than the block of a cross entropy."""


@dataclass(frozen=True, eq=False)
class DistillationRows:
    """The rows of one objective in a microbatch."""

    objective: Distillation
    rows: np.ndarray
    """Among all rows of the microbatch (N)."""
    targets: np.ndarray
    shares: np.ndarray
    """What each row counts in its job's loss: 1 / divisor of the global batch (N, float32)."""
    segments: np.ndarray
    """The segment of each row (N)."""
    teacher: tuple[ReferenceRows, ...]
    """What the teacher says, segment by segment."""


@dataclass(frozen=True, eq=False)
class DistillationPass:
    """What was found of one objective's rows."""

    segments: np.ndarray
    measured_KN: torch.Tensor
    """As `MEASURED` of the objective names them."""


@torch.no_grad()
def run_distillation(
    head: Head, hidden_TD: torch.Tensor, batch: Sequence[DistillationRows], grad_TD: torch.Tensor | None = None
) -> list[DistillationPass]:
    """What is measured of all taught rows and, given the gradient of the hidden states, what they add to it."""
    found = []
    for taught in batch:
        rows_N, targets_N, shares_N = (
            sent(torch.from_numpy(each), hidden_TD.device) for each in (taught.rows, taught.targets, taught.shares)
        )
        teacher = tuple(torch.cat(parts) for parts in zip(*(each.values for each in taught.teacher), strict=True))
        measured_KN = torch.empty(len(MEASURED), len(rows_N), device=hidden_TD.device)
        for start in range(0, len(rows_N), BLOCK):
            block = slice(start, min(start + BLOCK, len(rows_N)))
            raw_BV = head.linear(_padded(hidden_TD[rows_N[block]]))
            logits_BV = head.capped(raw_BV)
            teacher_BV = _teacher_logits(head, [_padded(part[block]) for part in teacher], logits_BV)
            judged = taught.objective.distillation_loss(logits_BV, teacher_BV, _padded(targets_N[block]))
            num_rows = block.stop - start
            measured_KN[:, block] = torch.stack(judged.measured_KB)[:, :num_rows]
            if grad_TD is not None:
                slopes_BV = judged.slopes_BV * _padded(shares_N[block])[:, None]
                grad_BD = head.input_gradient(head.uncapped(slopes_BV, logits_BV).to(raw_BV.dtype))
                grad_TD.index_copy_(0, rows_N[block], grad_BD[:num_rows])
        found.append(DistillationPass(taught.segments, measured_KN))
    return found


def top_tokens(head: Head, hidden_ND: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids (N, K, int32) of each row's most likely tokens and their log-probabilities (fp32), the first first."""
    ids, logprobs = [], []
    for start in range(0, len(hidden_ND), BLOCK):
        piece_BD = hidden_ND[start : start + BLOCK]
        logs_BV = head.logits(_padded(piece_BD)).log_softmax(dim=1)[: len(piece_BD)]
        values_BK, places_BK = logs_BV.topk(number, dim=1)
        ids.append(places_BK.int())
        logprobs.append(values_BK)
    return torch.cat(ids), torch.cat(logprobs)


def _teacher_logits(head: Head, said: Sequence[torch.Tensor], like_BV: torch.Tensor) -> torch.Tensor:
    """What the teacher says of a block: logits of its hidden states, or log-probabilities of the tokens it names."""
    if len(said) == 1:
        return head.logits(said[0])
    ids_BK, logprobs_BK = said
    return torch.full_like(like_BV, -torch.inf).scatter_(1, ids_BK.long(), logprobs_BK)


def _padded(values: torch.Tensor) -> torch.Tensor:
    """The rows of a block, of which the last may be missing."""
    return F.pad(values, (0, 0) * (values.dim() - 1) + (0, BLOCK - len(values)))
