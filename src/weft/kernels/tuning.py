"""Sizes of blocks, by operation and kind of GPU.

Keys are the GPU, the operation and the widest rank; never what is in a batch. No block size changes a bit of a result
but the sizes along a reduction (BK, BT), which are the same everywhere.
"""

from __future__ import annotations

import torch

from weft.kernels.launch import cdiv, next_power_of_2
from weft.kernels.tables import ROW_TILE

REDUCTION = 128
"""Elements of one block along a summed dimension: part of every result, so never tuned. On an H200 128 moved 3.5 TB/s
in `shrink` where 64 moved 1.2 to 2.6."""


SHARED_BYTES = {
    (8, 0): 163 * 1024,  # A100
    (8, 6): 99 * 1024,  # A40, RTX 3090
    (8, 9): 99 * 1024,  # L40S, RTX 4090
    (9, 0): 227 * 1024,  # H100, H200
    (10, 0): 227 * 1024,  # B200
    (12, 0): 99 * 1024,  # RTX 5090
}
"""Shared memory of one program by compute capability; unknown GPUs get the least."""


def shared_limit(device: torch.device) -> int:
    """Bytes of shared memory one program may have on a device."""
    if device.type != "cuda":
        return SHARED_BYTES[9, 0]
    return SHARED_BYTES.get(torch.cuda.get_device_capability(device), min(SHARED_BYTES.values()))


def _stages(wanted: int, stage_bytes: int, device: torch.device) -> int:
    """As many blocks in flight as wanted and as fit; how many changes no result."""
    return max(2, min(wanted, shared_limit(device) // stage_bytes))


def shrink_blocks(rank_class: int, num_parts: int, like: torch.Tensor) -> dict[str, int]:
    """For `shrink`, all parts' ranks in one block where they fit. H200, in us at 8192 x 4096: 19 for one part of rank
    16, 21 for three."""
    blocks = rank_blocks(rank_class, num_parts)
    stage = (ROW_TILE + blocks["BR"]) * REDUCTION * like.element_size()
    return {**blocks, "num_warps": 4, "num_stages": _stages(5 if blocks["BR"] < 64 else 3, stage, like.device)}


def weight_grad_blocks(rank_class: int, num_parts: int, like: torch.Tensor) -> dict[str, int]:
    """For `weight_grad`, likewise. H200, in us at 8192 x 4096: 22 for A or B of rank 16, 27 for three parts' A."""
    block = rank_blocks(rank_class, num_parts)["BR"]
    stage = (64 + block) * REDUCTION * like.element_size()
    return {"BN": 64, "BR": block, "num_warps": 4, "num_stages": _stages(3, stage, like.device)}


def expand_blocks(rank_class: int) -> dict[str, int]:
    """For `expand`. H200, in us at 8192 x 4096: 38 for rank 16; 128 columns at a time are 20 % slower there, and 20 %
    faster for ranks above 32."""
    blocks = rank_blocks(rank_class)
    is_wide = blocks["BR"] >= 64
    return {**blocks, "BN": 128 if is_wide else 64, "num_warps": 4, "num_stages": 1 if is_wide else 2}


def expand_grad_blocks(rank_class: int, num_parts: int) -> dict[str, int]:
    """For `expand_grad`, all parts' ranks in one block where they fit. H200, in us at 8192 x 4096: 42 for two parts of
    rank 16, 47 for three."""
    return {**rank_blocks(rank_class, num_parts), "BN": 128, "num_warps": 4, "num_stages": 2}


def swiglu_blocks(rank_class: int, *, backward: bool) -> dict[str, int]:
    """For `swiglu`, launched once for each class of ranks. Registers decide: as many programs side by side as can be.

    H200, in us at 8192 x 14336, forward and backward: 205 and 440 for rank 16, 276 and 535 for rank 64. Blocks of 32
    columns are not to be had: Triton 3.6 then gets the products with A wrong for ranks above 64.
    """
    blocks = {**rank_blocks(rank_class), "BN": 64, "num_warps": 8, "num_stages": 3}
    if rank_class <= 16:
        return blocks | ({"num_warps": 4} if backward else {"maxnreg": 80})
    if rank_class <= 64:
        return blocks | ({"num_stages": 2, "maxnreg": 128} if backward else {})
    return blocks | {"num_warps": 4}


def rank_blocks(rank_class: int, num_parts: int = 1) -> dict[str, int]:
    """How a kernel walks the rank of a part: in blocks of BR, of which the widest has RANK_BLOCKS.

    BR holds the ranks of all parts that one program computes together, up to 64.
    """
    block = min(64, max(16, next_power_of_2(num_parts * rank_class)))
    return {"BR": block, "RANK_BLOCKS": cdiv(rank_class, block)}
