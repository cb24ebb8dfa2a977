"""The lengths of the rows of W + s B A, without W + s B A.

    ‖w + s b A‖² = ‖w‖² + 2 s (w Aᵀ) · b + s² (b A Aᵀ) · b        for a row w of W and the row b of B that is beside it

So besides numbers per output and two products of rank R, no more of W is made fp32 at once than `_ROWS` rows. The
result depends on W, A and B alone: it is the same whoever shares the microbatch, and after a restart.

Shape suffixes: D in, O out, R rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_ROWS = 2048


def squared_norms(weight_OD: torch.Tensor) -> torch.Tensor:
    """‖w‖² of every row, in fp32."""
    return torch.cat([rows_ND.float().square().sum(dim=1) for rows_ND in weight_OD.split(_ROWS)])


def updated_norms(
    weight_OD: torch.Tensor,
    squared_O: torch.Tensor,
    a_RD: torch.Tensor,
    b_OR: torch.Tensor,
    scale: float,
    add_up: Callable[[torch.Tensor], torch.Tensor] = lambda part_O: part_O,
) -> torch.Tensor:
    """The lengths of the rows of W + scale · B A, given those of W squared.

    `add_up`: makes squares whole of which each of several devices has those of some inputs.
    """
    a_DR = a_RD.t()
    shared_OR = torch.cat([rows_ND.float().mm(a_DR) for rows_ND in weight_OD.split(_ROWS)])
    both_OR = shared_OR.mul_(2 * scale).add_(b_OR.mm(a_RD.mm(a_DR)), alpha=scale * scale)
    # Rounding may leave less than nothing of a row that B A takes away.
    return add_up(squared_O + (both_OR * b_OR).sum(dim=1)).clamp_min_(0).sqrt_()
