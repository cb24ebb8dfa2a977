"""Parts scale · B₀ A₀ of a weight W (out, in) that a LoRA can start as, with A₀ (r, in) and B₀ (out, r).

| `init_lora_weights` | B₀, A₀ |
|---|---|
| `pissa` | U √S, √S Vᵀ of the r largest singular values of W, over the scale (Meng et al. 2024) |
| `pissa_niter_N` | the same of a randomised decomposition with N iterations: less exact, far quicker |
| `loftq` | the same as `pissa` of what a quantised weight has lost (Li et al. 2023), which is given instead of W |
| `olora` | the first r columns of Q and rows of R of W = Q R (Büyükakyüz 2024) |

They are PEFT's up to the signs of singular vectors, which nothing depends on.
"""

from __future__ import annotations

import torch

from weft.methods.lora.leading import leading_svd, nearest_svd

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
