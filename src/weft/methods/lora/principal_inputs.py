"""The directions in which the inputs of a linear vary most, from rows that come a few at a time.

EVA (Paischer et al. 2024) starts A as them. What is kept of the rows so far is their mean μ, and the leading right
singular vectors V with their values S of all of them less μ. With n of them behind, m more rows X of the mean ν give
    S, V ← the leading part of [S V; X − ν; √(n m / (n + m)) (μ − ν)]
(Ross et al. 2008), as PEFT's `IncrementalPCA` does.

Shape suffixes: N rows, D features, R directions.
"""

from __future__ import annotations

import math

import torch

from weft.methods.lora.leading import leading_svd

ITERATIONS = 4
"""Of the quick decomposition of a few rows, which has twice the directions that are asked for, as in PEFT."""
SMALLEST = 1e-5
"""Directions whose value is a smaller part of the largest one are rounding errors."""


class PrincipalInputs:
    """What is known of the inputs of one linear."""

    def __init__(self, rank: int, generator: torch.Generator) -> None:
        self._rank, self._generator = rank, generator
        self._num_rows = 0
        self._mean_D = torch.zeros(0)
        self._values_R = torch.zeros(0)
        self.directions_RD = torch.zeros(0, 0)
        """Orthonormal, the first first; fewer than were asked for where the rows have no more."""
        self.cosine = 0.0
        """The smallest of any direction to itself before the last rows came; 0 while there are not enough."""

    def add(self, x_ND: torch.Tensor) -> None:
        """Takes more rows in, in fp32; without any nothing changes."""
        if not len(x_ND):
            return
        mean_D, before_RD, num_rows = x_ND.mean(dim=0), self.directions_RD, len(x_ND)
        total = self._num_rows + num_rows
        stacked_MD = x_ND - mean_D
        if self._num_rows:
            shift_D = math.sqrt(self._num_rows * num_rows / total) * (self._mean_D - mean_D)
            stacked_MD = torch.cat([self._values_R[:, None] * before_RD, stacked_MD, shift_D[None]])
            mean_D = self._mean_D + (mean_D - self._mean_D) * (num_rows / total)
        _, values_K, vt_KD = leading_svd(
            stacked_MD, min(2 * self._rank, *stacked_MD.shape), ITERATIONS, self._generator
        )
        count = min(self._rank, int((values_K > SMALLEST * values_K[0]).sum()))
        self._num_rows, self._mean_D = total, mean_D
        self._values_R, self.directions_RD = values_K[:count], _signed(vt_KD[:count])
        if count == self._rank == len(before_RD):
            self.cosine = float((self.directions_RD * before_RD).sum(dim=1).min())


def _signed(vt_RD: torch.Tensor) -> torch.Tensor:
    """The same directions, in each of which the largest number is above zero."""
    largest_R1 = vt_RD.abs().argmax(dim=1, keepdim=True)
    return vt_RD * vt_RD.gather(1, largest_R1).sign()
