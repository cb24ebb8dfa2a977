"""Heads of jobs: logits of labels from the hidden states of some rows, their losses, and the gradients of both.

Every head is a job's own, so only that job's rows go through it. Logits are made in blocks of fixed size and weights'
gradients are added sample by sample in the job's order, so neither neighbours nor the cut into microbatches change a
bit. Nothing waits for the device. Shape suffixes: T rows of the microbatch, N rows with a label, L labels, D width,
B rows of a block, U units that a loss is counted in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from weft.adapters.head import HeadWeights
from weft.kernels.device_event import sent
from weft.objectives.heads.head_objective import HeadLoss, HeadObjective

BLOCK = 16
"""Rows whose logits are made at once, padded where there are fewer."""


@dataclass(frozen=True, eq=False)
class LabelledRows:
    """The rows of one job in a microbatch that its head looks at."""

    slot: int
    objective: HeadObjective
    rows: np.ndarray
    """Among all rows of the microbatch (N)."""
    labels: np.ndarray
    """float32 (N)."""
    shares: np.ndarray
    """What each row's unit counts in the job's loss: 1 / divisor of the global batch (N, float32)."""
    segments: np.ndarray
    """The segment of each row (N)."""

    @property
    def unit_segments(self) -> np.ndarray:
        """The segment that each unit is counted to: that of its first row."""
        return self.segments[:: self.objective.group_size]

    @property
    def unit_labels(self) -> np.ndarray:
        """The label of each unit's first row."""
        return self.labels[:: self.objective.group_size]

    @property
    def sample_lengths(self) -> list[int]:
        """Rows of each sample, in order."""
        _, counts = np.unique(self.segments, return_counts=True)
        return [int(count) for count in counts]


@dataclass(frozen=True, eq=False)
class HeadPass:
    """What one job's head found in a microbatch."""

    labelled: LabelledRows
    judged: HeadLoss


@torch.no_grad()
def run_heads(
    hidden_TD: torch.Tensor,
    batch: Sequence[LabelledRows],
    heads: Mapping[int, HeadWeights],
    grad_TD: torch.Tensor | None = None,
) -> list[HeadPass]:
    """The losses of all labelled rows and, given the gradient of the hidden states, what they add to all gradients."""
    found = []
    for labelled in batch:
        head, device = heads[labelled.slot], hidden_TD.device
        rows_N = sent(torch.from_numpy(labelled.rows), device)
        labels_N = sent(torch.from_numpy(labelled.labels), device)
        hidden_ND = hidden_TD[rows_N]
        logits_NL = _in_blocks(head.logits, hidden_ND)
        judged = labelled.objective.head_loss(logits_NL, labels_N)
        found.append(HeadPass(labelled, judged))
        if grad_TD is None:
            continue
        slopes_NL = judged.slopes_NL * sent(torch.from_numpy(labelled.shares), device)[:, None]
        grad_TD.index_copy_(0, rows_N, _in_blocks(head.input_gradient, slopes_NL).to(grad_TD.dtype))
        lengths = labelled.sample_lengths
        for own_ND, own_NL in zip(hidden_ND.split(lengths), slopes_NL.split(lengths), strict=True):
            head.add_gradients(own_ND, own_NL)
    return found


def _in_blocks(product: Callable[[torch.Tensor], torch.Tensor], values_NX: torch.Tensor) -> torch.Tensor:
    """A product of rows, a block of fixed size at a time."""
    pieces = []
    for first in range(0, len(values_NX), BLOCK):
        piece = values_NX[first : first + BLOCK]
        padded = F.pad(piece, (0, 0, 0, BLOCK - len(piece)))
        pieces.append(product(padded)[: len(piece)])
    return torch.cat(pieces)
