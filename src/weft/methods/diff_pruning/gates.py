"""Gates that open or close single positions: the hard concrete distribution (Louizos et al. 2018).

A gate has one trained number g. With u uniform in (0, 1), drawn for every optimizer step:
    s = sigmoid(g + log u - log(1 - u)),    z = min(1, max(0, 3 s - 1.5))
So z is often exactly 0 or 1, and in between dz/dg = 3 s (1 - s). It is above 0 with the probability sigmoid(g), whose
sum over all gates is the expected number of open ones: what the penalty is of. Where nothing is drawn (evaluation,
answers, files), u is a half: a gate is open if g > 0.

u is a hash of (job seed, job step, module, number of the gate): no neighbour, microbatch or restart changes it.
"""

from __future__ import annotations

import torch

OPEN = 6.0
"""A g whose gate is exactly 1 where nothing is drawn; with the other sign, exactly 0."""
START = 1.0
"""Where every g starts: open more often than not, and seldom beyond reach of gradients."""
_MASK = 0xFFFFFFFF
_STRIDE = 0x9E3779B1


def uniform(key: int, number: int, device: torch.device) -> torch.Tensor:
    """So many numbers in (0, 1), fp32: a pure function of the key and each one's place."""
    x = torch.arange(number, dtype=torch.int64, device=device).mul_(_STRIDE).add_(key & _MASK).bitwise_and_(_MASK)
    for factor, shift in ((0x7FEB352D, 15), (0x846CA68B, 16)):
        # Only the lower 32 bits count, and these are right however the product overflows.
        x = (x ^ (x >> shift)).mul_(factor).bitwise_and_(_MASK)
    x = (x ^ (x >> 16)) >> 8
    return x.float().add_(0.5).mul_(2.0**-24)


def drawn(g: torch.Tensor, key: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Z and dz/dg of every gate; without a key nothing is drawn."""
    noisy = g
    if key is not None:
        u = uniform(key, g.numel(), g.device)
        noisy = g + torch.log(u) - torch.log1p(-u)
    s = torch.sigmoid(noisy)
    stretched = 3.0 * s - 1.5
    inside = (stretched > 0) & (stretched < 1)
    return stretched.clamp(0.0, 1.0), torch.where(inside, 3.0 * s * (1.0 - s), 0.0)


def penalty_gradient(g: torch.Tensor) -> torch.Tensor:
    """The gradient of the expected number of open gates."""
    share = torch.sigmoid(g)
    return share * (1.0 - share)
