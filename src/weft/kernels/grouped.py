"""Products of rows that are sorted by group, with a weight for each group: the rows of a layer's experts.

    y[s] = x[s] · w[g]                        s in group g; x (S, K), w (G, K, N), y (S, N)
    grad[g] += scale · left[g]ᵀ · right[g]    left (S, M), right (S, N), grad (G, M, N) in fp32

`ends_G` has for each group the index after its last row, on the rows' device.

A row's result depends on that row alone. On a CPU the bits of a product depend on how many rows it has, so every
product has blocks of `BLOCK` rows, the last one filled with zeros. On a GPU torch's grouped product reads the ends on
the device, and adds along K in one order for any number of rows. Types and sizes that it does not take, or for which
`_keeps_bits` finds another result, are computed in blocks, as on a CPU. A gradient is a sum over the rows of one call,
which belong to one sample; on a GPU that sum is rounded once to the rows' type.

Shape suffixes: S rows, G groups, K inputs, N outputs, M columns of the left factor.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F

BLOCK = 32
"""Rows of a block: with many groups each has few rows, and larger blocks would be mostly padding."""


def grouped_product(x_SK: torch.Tensor, w_GKN: torch.Tensor, ends_G: torch.Tensor) -> torch.Tensor:
    """Each group's rows times its weight, (S, N)."""
    if _has_grouped_kernel(x_SK, w_GKN):
        return F.grouped_mm(x_SK, w_GKN, offs=ends_G)
    y_SN = x_SK.new_empty(len(x_SK), w_GKN.shape[2])
    for group, rows in _groups(ends_G):
        for start in range(rows.start, rows.stop, BLOCK):
            end = min(start + BLOCK, rows.stop)
            block_BK = x_SK[start:end]
            if end - start < BLOCK:
                block_BK = F.pad(block_BK, (0, 0, 0, BLOCK - (end - start)))
            y_SN[start:end] = block_BK.mm(w_GKN[group])[: end - start]
    return y_SN


def add_grouped_gradient(
    grad_GMN: torch.Tensor, left_SM: torch.Tensor, right_SN: torch.Tensor, ends_G: torch.Tensor, scale: float
) -> None:
    """Adds the gradient of every group's weight over the rows of one sample.

    Columns of the factors beyond the gradient's sizes are left out.
    """
    num_left, num_right = grad_GMN.shape[1:]
    if _has_grouped_kernel(left_SM, right_SN):
        made_GMN = F.grouped_mm(left_SM.t(), right_SN, offs=ends_G)
        starts_G = F.pad(ends_G[:-1], (1, 0))
        # The kernel leaves the result of a group without rows unwritten.
        made_GMN = made_GMN[:, :num_left, :num_right].masked_fill((starts_G == ends_G)[:, None, None], 0)
        grad_GMN.add_(made_GMN, alpha=scale)
        return
    for group, rows in _groups(ends_G):
        left_MB, right_BN = left_SM[rows, :num_left].t(), right_SN[rows, :num_right]
        grad_GMN[group].addmm_(left_MB.float(), right_BN.float(), alpha=scale)


def _groups(ends_G: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """The groups that have rows."""
    start = 0
    for group, end in enumerate(ends_G.tolist()):
        if end > start:
            yield group, slice(start, end)
        start = end


def _has_grouped_kernel(left: torch.Tensor, right: torch.Tensor) -> bool:
    """True if torch's grouped product is right for two factors: on a GPU, and in half precision with sizes of whole
    vectors of 16 bytes."""
    num_left, num_right = left.shape[1], right.shape[-1]
    if not left.is_cuda or left.dtype not in (torch.bfloat16, torch.float16) or num_left % 8 or num_right % 8:
        return False
    return _keeps_bits(num_left, num_right, left.dtype, left.device)


@functools.cache
def _keeps_bits(num_left: int, num_right: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch's grouped products of these sizes are right, with the same bits for other numbers of rows."""
    generator = torch.Generator().manual_seed(0)
    x_SK, r_SN = (torch.randn(300, n, generator=generator).to(device, dtype) for n in (num_left, num_right))
    w_GKN = torch.randn(3, num_left, num_right, generator=generator).to(device, dtype)
    many, few = (torch.tensor(ends, dtype=torch.int32, device=device) for ends in ((40, 40, 300), (40, 40, 47)))
    try:
        y_SN, rows = F.grouped_mm(x_SK, w_GKN, offs=many), F.grouped_mm(x_SK[:47], w_GKN, offs=few)
        whole, part = (F.grouped_mm(x.t(), r, offs=e) for x, r, e in ((x_SK, r_SN, many), (x_SK[:47], r_SN[:47], few)))
    except RuntimeError:
        return False
    expected_40N, sum_KN = x_SK[:40].float() @ w_GKN[0].float(), x_SK[:40].float().t() @ r_SN[:40].float()
    is_right = all(
        bool((found.float() - expected).norm() <= 0.01 * expected.norm())
        for found, expected in ((y_SN[:40], expected_40N), (whole[0], sum_KN))
    )
    return is_right and torch.equal(y_SN[:47], rows) and torch.equal(whole[0], part[0])
