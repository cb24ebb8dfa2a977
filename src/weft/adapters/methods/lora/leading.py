"""The leading singular values and vectors of a matrix, by quick iterations (Halko et al. 2011)."""

from __future__ import annotations

import torch


def leading_svd(
    matrix_MD: torch.Tensor, rank: int, iterations: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """About U (M, R), the values and Vᵀ (R, D) of the largest; a rank of the smaller side or above is exact."""
    basis_MR = _leading_columns(matrix_MD, rank, iterations, generator)
    u_RR, values_R, vt_RD = torch.linalg.svd(basis_MR.t() @ matrix_MD, full_matrices=False)
    return basis_MR @ u_RR, values_R, vt_RD


def _leading_columns(matrix_MD: torch.Tensor, rank: int, iterations: int, generator: torch.Generator) -> torch.Tensor:
    """About the span of the leading left singular vectors: power iterations of a random start."""
    start_DR = torch.randn(matrix_MD.shape[1], rank, generator=generator).to(matrix_MD.device)
    basis_MR: torch.Tensor = torch.linalg.qr(matrix_MD @ start_DR)[0]
    for _ in range(iterations):
        basis_DR = torch.linalg.qr(matrix_MD.t() @ basis_MR)[0]
        basis_MR = torch.linalg.qr(matrix_MD @ basis_DR)[0]
    return basis_MR
