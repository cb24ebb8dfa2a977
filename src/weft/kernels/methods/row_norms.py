"""The lengths of the rows of W + B A for all modules of an adapter, in one launch that reads each W once.

    norm[o] = ‖W[o] + B[o] A‖             (O), W (O, D), B (O, P) with the scale in it, A (P, D)
W is frozen, so for narrow ranks its row norms are cached, and the contribution of A and B is computed in rank space,
where W is read at the memory's full speed:
    norm² = ‖W‖² + 2 (W Aᵀ) · B + (B A Aᵀ) · B
Sums along D in fp32, in blocks from the first to the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft.kernels.launch import jit, next_power_of_2, runs_triton, tl

_ROWS = 64
_NARROW = 64
"""Ranks up to which A Aᵀ fits besides all else."""


@dataclass(frozen=True)
class NormedRows:
    """One module: W, A and B in the type of the activations, contiguous, and room for the lengths in fp32."""

    weight_OD: torch.Tensor
    a_PD: torch.Tensor
    b_OP: torch.Tensor
    norms_O: torch.Tensor


class RowNorms:
    def __init__(self, modules: Sequence[NormedRows]) -> None:
        self._modules = modules
        device = modules[0].weight_OD.device
        self._squares = [_squares(module.weight_OD) for module in modules]
        lines = [
            (*_addresses(module), squares_O.data_ptr(), *module.weight_OD.shape, len(module.a_PD))
            for module, squares_O in zip(modules, self._squares, strict=True)
        ]
        self._table_M8 = torch.tensor(lines, dtype=torch.int64, device=device)
        blocks = [(m, first) for m, module in enumerate(modules) for first in range(0, len(module.norms_O), _ROWS)]
        self._blocks_N2 = torch.tensor(blocks, dtype=torch.int32, device=device)
        self._widest = max(16, next_power_of_2(max(len(module.a_PD) for module in modules)))
        self._in_vectors = all(module.weight_OD.shape[1] % 16 == 0 for module in modules)
        """True if rows begin at whole vectors, as in all supported models: the kernel is compiled for it."""

    def measure(self) -> None:
        if not runs_triton(self._table_M8):
            self.measure_plainly()
            return
        self.launch()

    def measure_plainly(self) -> None:
        for module in self._modules:
            updated_OD = module.weight_OD.float() + module.b_OP.float() @ module.a_PD.float()
            module.norms_O.copy_(updated_OD.norm(dim=1))

    def launch(self) -> None:
        _norms[(len(self._blocks_N2),)](
            self._table_M8,
            self._blocks_N2,
            self._modules[0].weight_OD,
            P=self._widest,
            BM=_ROWS,
            BK=128 if self._widest <= _NARROW else 32,
            IS_NARROW=self._widest <= _NARROW,
            IN_VECTORS=self._in_vectors,
            num_warps=4,
            num_stages=4,
        )


def _squares(weight_OD: torch.Tensor) -> torch.Tensor:
    return weight_OD.float().square().sum(dim=1)


def _addresses(module: NormedRows) -> tuple[int, ...]:
    return tuple(t.data_ptr() for t in (module.weight_OD, module.a_PD, module.b_OP, module.norms_O))


@jit
def _norms(  # type: ignore[no-untyped-def]
    table,
    blocks,
    like,
    P: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    IS_NARROW: tl.constexpr,
    IN_VECTORS: tl.constexpr,
):
    """`like`: any tensor of the weights' type."""
    block = blocks + tl.program_id(0) * 2
    line = table + tl.load(block).to(tl.int64) * 8
    kind: tl.constexpr = like.dtype.element_ty
    weight = tl.multiple_of(tl.load(line).to(tl.pointer_type(kind)), 16)
    a = tl.multiple_of(tl.load(line + 1).to(tl.pointer_type(kind)), 16)
    b = tl.multiple_of(tl.load(line + 2).to(tl.pointer_type(kind)), 16)
    norms = tl.load(line + 3).to(tl.pointer_type(tl.float32))
    frozen = tl.load(line + 4).to(tl.pointer_type(tl.float32))
    num_out, num_in, width = tl.load(line + 5), tl.load(line + 6), tl.load(line + 7)
    width = tl.multiple_of(width, 8)
    if IN_VECTORS:
        num_in = tl.multiple_of(num_in, 16)
    rows = tl.load(block + 1) + tl.arange(0, BM)
    ranks = tl.arange(0, P)
    row_mask, has = rows < num_out, ranks < width
    there = row_mask[:, None] & has[None, :]
    b_tile = tl.load(b + rows.to(tl.int64)[:, None] * width + ranks[None, :], mask=there, other=0.0)
    w_a = tl.zeros((BM, P), dtype=tl.float32)
    a_a = tl.zeros((P, P), dtype=tl.float32)
    squares = tl.zeros((BM,), dtype=tl.float32)
    for k in range(0, num_in.to(tl.int32), BK):
        columns = k + tl.arange(0, BK)
        inside = columns < num_in
        tile = tl.load(
            weight + rows.to(tl.int64)[:, None] * num_in + columns[None, :],
            mask=row_mask[:, None] & inside[None, :],
            other=0.0,
        )
        a_tile = tl.load(
            a + ranks.to(tl.int64)[:, None] * num_in + columns[None, :], mask=has[:, None] & inside[None, :], other=0.0
        )
        if IS_NARROW:
            w_a = tl.dot(tile, tl.trans(a_tile), w_a, input_precision="ieee")
            a_a = tl.dot(a_tile, tl.trans(a_tile), a_a, input_precision="ieee")
        else:
            updated = tile.to(tl.float32) + tl.dot(b_tile, a_tile, input_precision="ieee")
            squares += tl.sum(updated * updated, axis=1)
    if IS_NARROW:
        b_wide = b_tile.to(tl.float32)
        changed = 2 * w_a + tl.dot(b_wide, a_a, input_precision="ieee")
        squares = tl.load(frozen + rows, mask=row_mask, other=0.0) + tl.sum(changed * b_wide, axis=1)
    tl.store(norms + rows, tl.sqrt(tl.maximum(squares, 0.0)), mask=row_mask)
