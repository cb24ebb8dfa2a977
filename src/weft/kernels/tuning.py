"""Sizes of blocks, by operation and kind of GPU.

Keys are the GPU, the operation and the widest rank; never what is in a batch. No block size changes a bit of a result
but the sizes along a reduction (BK, BT), which are the same everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class Blocks:
    """How one kernel is launched."""

    width: int
    """Columns of a block."""
    num_warps: int
    num_stages: int

    @property
    def launch(self) -> dict[str, int]:
        """The launch options of Triton."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


def rank_block(rank_class: int) -> int:
    """Columns of rank space that one program computes: all up to 64, then 64 at a time."""
    return min(64, max(16, next_power_of_2(rank_class)))


def shared_limit(device: torch.device) -> int:
    """Bytes of shared memory one program may have on a device."""
    if device.type != "cuda":
        return SHARED_BYTES[9, 0]
    return SHARED_BYTES.get(torch.cuda.get_device_capability(device), min(SHARED_BYTES.values()))


def _stages(wanted: int, stage_bytes: int, device: torch.device) -> int:
    """As many blocks in flight as wanted and as fit; how many changes no result."""
    return max(2, min(wanted, shared_limit(device) // stage_bytes))


def shrink_blocks(block: int, like: torch.Tensor) -> Blocks:
    """For `shrink`, by its columns of rank space. H200: 19 us at 8192 x 4096 and rank 16, 21 us at rank 64."""
    stage = (ROW_TILE + block) * REDUCTION * like.element_size()
    return Blocks(block, 4 if block < 64 else 8, _stages(5, stage, like.device))


def weight_grad_blocks(block: int, like: torch.Tensor) -> Blocks:
    """For `weight_grad`. H200: 24 us each for A and B at 8192 x 4096 and rank 16, 25 and 30 us at rank 64."""
    stage = (64 + block) * REDUCTION * like.element_size()
    return Blocks(64, 4, _stages(4 if block < 64 else 3, stage, like.device))


def rank_blocks(rank_class: int) -> dict[str, int]:
    """How a kernel walks a rank: in blocks of BR, of which the widest rank has RANK_BLOCKS."""
    block = rank_block(rank_class)
    return {"BR": block, "RANK_BLOCKS": cdiv(rank_class, block)}
