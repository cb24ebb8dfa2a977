"""Where in a weight a sparse difference lives: the share of its numbers that are smallest in size.

Small weights say least of what the model knows already, so changing them disturbs it least, and the choice needs no
data (Liao et al. 2023). It follows from the weight alone: a job that is resumed finds the same positions, and no file
has to keep them while it trains.
"""

from __future__ import annotations

import torch

from weft.kernels.device import is_gpu


def num_positions(density: float, num_weights: int) -> int:
    """How many numbers of a weight may change; at least one."""
    return max(1, round(density * num_weights))


@torch.no_grad()
def smallest_positions(weight_OD: torch.Tensor, number: int) -> torch.Tensor:
    """The places of the smallest numbers in the flattened weight, ascending, int32.

    Of equally small ones, of which a quantised weight has many, some are taken at even distances: the choice depends on
    no sorting algorithm, and does not crowd in the first rows.
    """
    sizes = weight_OD.detach().float().abs().flatten()
    # On a GPU a whole sort is far quicker than looking for one number.
    limit = sizes.sort().values[number - 1] if is_gpu(sizes.device) else sizes.kthvalue(number).values
    below, equal = (sizes < limit).nonzero().flatten(), (sizes == limit).nonzero().flatten()
    missing = number - len(below)
    spread = torch.arange(missing, device=sizes.device) * len(equal) // missing
    return torch.cat([below, equal[spread]]).sort().values.to(torch.int32)


def with_others(taken: torch.Tensor, candidates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As many positions as there are candidates, ascending: those `taken` and the first others of the candidates.

    Also returned: where among them the taken ones are, in their order.
    """
    others = candidates[~torch.isin(candidates, taken)]
    both = torch.cat([taken, others[: len(candidates) - len(taken)]]).sort().values
    return both, torch.searchsorted(both, taken)
