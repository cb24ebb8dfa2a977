"""A microbatch under way."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class Score:
    """What one segment's own supervised rows came to."""

    loss_sum: float
    num_hits: int
    """Rows whose target had the largest logit; ties count, rows that are not a number do not."""


@dataclass(frozen=True)
class Running:
    """A microbatch that a device works on."""

    results_2N: torch.Tensor
    """Loss and hit (1 or 0) of every supervised row, once the device has got there."""
    counts: tuple[int, ...]
    """Supervised rows of each segment."""

    def scores(self) -> list[Score]:
        """Each segment's score, over its own rows only; waits for the device."""
        losses, hits = self.results_2N.cpu().double().numpy()
        ends = np.cumsum(self.counts).tolist()
        spans = [slice(end - count, end) for count, end in zip(self.counts, ends, strict=True)]
        return [Score(float(losses[span].sum()), int(hits[span].sum())) for span in spans]

    def losses(self) -> list[float]:
        """Each segment's summed loss, over its own rows only; waits for the device."""
        return [score.loss_sum for score in self.scores()]
