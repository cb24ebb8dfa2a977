"""Weights in eight bits: integers with one fp32 scale per row.

    scale_o = max_d |w_od| / 127
    q_od    = round(w_od / scale_o)        so w ≈ q · scale, off by at most half a scale
The conversion back, q · scale, is `weft.kernels.storage.fp8.dequantise`: rows of 8-bit floats and of 8-bit integers
differ only in how a byte is read. The one reduction is a maximum over a row, which has no order; activations and their
NaNs never come here.

Shape suffixes: O out (rows), D in (columns).
"""

from __future__ import annotations

import torch

LARGEST = 127.0
TINIEST = 1e-30
"""Replacement for the largest number of a row of zeros."""
_ROWS_AT_ONCE = 1024
"""Rows quantised together, which limits the temporary memory."""


@torch.no_grad()
def quantise_int8(weight_OD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(q_OD in int8, scale_O in fp32) with w ≈ q · scale, made once when a backbone is loaded."""
    parts = [_quantise_rows(rows) for rows in weight_OD.split(_ROWS_AT_ONCE)]
    q_OD, scale_O = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return q_OD, scale_O


def _quantise_rows(weight_OD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weight_OD = weight_OD.float()
    scale_O = weight_OD.abs().amax(dim=1).clamp(min=TINIEST) / LARGEST
    return (weight_OD / scale_O[:, None]).round().clamp(-LARGEST, LARGEST).to(torch.int8), scale_O
