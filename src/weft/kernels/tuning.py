"""Sizes of blocks, by operation and kind of GPU.

Keys are the GPU, the operation and the widest rank; never what is in a batch. No block size changes a bit of a result
but the sizes along a reduction (BK, BT), which are the same everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.kernels.launch import cdiv, next_power_of_2

REDUCTION = 128
"""Elements of one block along a summed dimension: part of every result, so never tuned. On an H200 128 moved 3.5 TB/s
in `shrink` where 64 moved 1.2 to 2.6."""


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


def shrink_blocks(block: int) -> Blocks:
    """For `shrink`, by its columns of rank space. H200: 19 us at 8192 x 4096 and rank 16, 21 us at rank 64."""
    return Blocks(block, 4 if block < 64 else 8, 5)


def weight_grad_blocks(block: int) -> Blocks:
    """For `weight_grad`. H200: 24 us each for A and B at 8192 x 4096 and rank 16, 25 and 30 us at rank 64."""
    return Blocks(64, 4, 4 if block < 64 else 3)


def rank_blocks(rank_class: int) -> dict[str, int]:
    """How a kernel walks a rank: in blocks of BR, of which the widest rank has RANK_BLOCKS."""
    block = rank_block(rank_class)
    return {"BR": block, "RANK_BLOCKS": cdiv(rank_class, block)}
