"""The leading singular values and vectors of a matrix, without the others: about, or exactly."""

from __future__ import annotations

import torch


def leading_svd(
    matrix_MD: torch.Tensor, rank: int, iterations: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """About U (M, R), the values and Vᵀ (R, D) of the largest, by quick iterations (Halko et al. 2011).

    A rank of the smaller side or above is exact.
    """
    basis_MR = _leading_columns(matrix_MD, rank, iterations, generator)
    u_RR, values_R, vt_RD = torch.linalg.svd(basis_MR.t() @ matrix_MD, full_matrices=False)
    return basis_MR @ u_RR, values_R, vt_RD


def nearest_svd(matrix_MD: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same so that no product of this rank comes nearer to the matrix, whatever its values fall off like.

    U are eigenvectors of the smaller square, M Mᵀ, which cost less than all of U and V. Rounding may turn U among
    values that are nearly the same, by which the product gets no worse.
    """
    if matrix_MD.shape[0] > matrix_MD.shape[1]:
        u_DR, values_R, vt_RM = nearest_svd(matrix_MD.t(), rank)
        return vt_RM.t(), values_R, u_DR.t()
    u_MR = torch.linalg.eigh(matrix_MD @ matrix_MD.t())[1].flip(1)[:, :rank]
    scaled_RD = u_MR.t() @ matrix_MD
    values_R = scaled_RD.norm(dim=1)
    return u_MR, values_R, scaled_RD / values_R.clamp(min=torch.finfo(values_R.dtype).tiny)[:, None]


def _leading_columns(matrix_MD: torch.Tensor, rank: int, iterations: int, generator: torch.Generator) -> torch.Tensor:
    """About the span of the leading left singular vectors: power iterations of a random start."""
    start_DR = torch.randn(matrix_MD.shape[1], rank, generator=generator).to(matrix_MD.device)
    basis_MR: torch.Tensor = torch.linalg.qr(matrix_MD @ start_DR)[0]
    for _ in range(iterations):
        basis_DR = torch.linalg.qr(matrix_MD.t() @ basis_MR)[0]
        basis_MR = torch.linalg.qr(matrix_MD @ basis_DR)[0]
    return basis_MR
