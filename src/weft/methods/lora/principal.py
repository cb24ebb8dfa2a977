"""Starting values of a LoRA from the leading directions of a weight, or of the inputs of a linear.

Of a weight W (out, in), parts scale · B₀ A₀ with A₀ (r, in) and B₀ (out, r):

| `init_lora_weights` | B₀, A₀ |
|---|---|
| `pissa` | U √S, √S Vᵀ of the r largest singular values of W, over the scale (Meng et al. 2024) |
| `pissa_niter_N` | the same by a randomised decomposition with N iterations: less exact, much faster |
| `loftq` | `pissa` of the quantisation error, which is given instead of W (Li et al. 2023) |
| `olora` | the first r columns of Q and rows of R of W = Q R (Büyükakyüz 2024) |

They equal PEFT's up to the signs of singular vectors, which do not matter.

Of the inputs, which come a few rows at a time, the directions in which they vary most: EVA (Paischer et al. 2024)
starts A as them. What is kept of the n rows so far is their mean μ, and the leading right singular vectors V with their
values S of all of them less μ. m more rows X of the mean ν give
    S, V ← the leading part of [S V; X − ν; √(n m / (n + m)) (μ − ν)]
(Ross et al. 2008), as PEFT's `IncrementalPCA` does.

Shape suffixes: N rows, D features, R directions.
"""

from __future__ import annotations

import math

import torch


def leading_svd(
    matrix_MD: torch.Tensor, rank: int, iterations: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Approximate U (M, R), and the values and Vᵀ (R, D) of the largest singular values (Halko et al. 2011). Exact for
    a rank of at least the smaller side."""
    basis_MR = _leading_columns(matrix_MD, rank, iterations, generator)
    u_RR, values_R, vt_RD = torch.linalg.svd(basis_MR.t() @ matrix_MD, full_matrices=False)
    return basis_MR @ u_RR, values_R, vt_RD


def nearest_svd(matrix_MD: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same with the smallest error of any product of this rank, however slowly the singular values fall. U are
    eigenvectors of the smaller square, M Mᵀ, which cost less than all of U and V. Rounding may turn U among nearly
    equal values, which does not make the product worse."""
    if matrix_MD.shape[0] > matrix_MD.shape[1]:
        u_DR, values_R, vt_RM = nearest_svd(matrix_MD.t(), rank)
        return vt_RM.t(), values_R, u_DR.t()
    u_MR = torch.linalg.eigh(matrix_MD @ matrix_MD.t())[1].flip(1)[:, :rank]
    scaled_RD = u_MR.t() @ matrix_MD
    values_R = scaled_RD.norm(dim=1)
    return u_MR, values_R, scaled_RD / values_R.clamp(min=torch.finfo(values_R.dtype).tiny)[:, None]


def _leading_columns(matrix_MD: torch.Tensor, rank: int, iterations: int, generator: torch.Generator) -> torch.Tensor:
    """Approximate span of the leading left singular vectors: power iterations from a random start."""
    start_DR = torch.randn(matrix_MD.shape[1], rank, generator=generator).to(matrix_MD.device)
    basis_MR: torch.Tensor = torch.linalg.qr(matrix_MD @ start_DR)[0]
    for _ in range(iterations):
        basis_DR = torch.linalg.qr(matrix_MD.t() @ basis_MR)[0]
        basis_MR = torch.linalg.qr(matrix_MD @ basis_DR)[0]
    return basis_MR


_EXTRA_ITERATIONS = "pissa_niter_"


def starting_part(
    weight_OD: torch.Tensor, init: str, rank: int, scale: float, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """A₀ and B₀, in fp32 on the weight's device."""
    if init == "olora":
        q_OK, r_KD = torch.linalg.qr(weight_OD)
        return r_KD[:rank], q_OK[:, :rank]
    if init.startswith(_EXTRA_ITERATIONS):
        iterations = int(init.removeprefix(_EXTRA_ITERATIONS))
        u_OR, values_R, vt_RD = leading_svd(weight_OD, rank, iterations, generator)
    elif init == "loftq":
        u_OR, values_R, vt_RD = nearest_svd(weight_OD, rank)
    else:
        u_OK, values_K, vt_KD = torch.linalg.svd(weight_OD, full_matrices=False)
        u_OR, values_R, vt_RD = u_OK[:, :rank], values_K[:rank], vt_KD[:rank]
    roots_R = (values_R / scale).sqrt()
    return roots_R[:, None] * vt_RD, u_OR * roots_R


ITERATIONS = 4
"""Iterations of the quick decomposition of a few rows, which has twice the requested directions, as in PEFT."""
SMALLEST = 1e-5
"""Values below this share of the largest are rounding errors."""


class PrincipalInputs:
    def __init__(self, rank: int, generator: torch.Generator) -> None:
        self._rank, self._generator = rank, generator
        self._num_rows = 0
        self._mean_D = torch.zeros(0)
        self._values_R = torch.zeros(0)
        self.directions_RD = torch.zeros(0, 0)
        """Orthonormal directions, the leading one first; fewer than requested if the rows have no more."""
        self.cosine = 0.0
        """Smallest cosine of a direction with itself before the last rows; 0 while there are too few."""

    def add(self, x_ND: torch.Tensor) -> None:
        """Adds rows, in fp32; without rows nothing changes."""
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
    """The same directions with signs that make the largest number of each positive."""
    largest_R1 = vt_RD.abs().argmax(dim=1, keepdim=True)
    return vt_RD * vt_RD.gather(1, largest_R1).sign()
