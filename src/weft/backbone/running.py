"""A microbatch under way."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Running:
    """A microbatch that a device works on."""

    losses_N: torch.Tensor
    """Of every supervised row, once the device has got there."""
    counts: tuple[int, ...]
    """Supervised rows of each segment."""

    def losses(self) -> list[float]:
        """Each segment's summed loss, over its own rows only; waits for the device."""
        losses = self.losses_N.cpu().double().numpy()
        ends = np.cumsum(self.counts).tolist()
        return [float(losses[end - count : end].sum()) for count, end in zip(self.counts, ends, strict=True)]
