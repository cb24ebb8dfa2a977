"""The lengths of the rows of W + B A for all modules of an adapter, in one launch that reads each W once.

    norm[o] = ‖W[o] + B[o] A‖             (O), W (O, D), B (O, P) with the scale in it, A (P, D)
Sums along D in fp32, in blocks from the first to the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft.kernels.launch import jit, next_power_of_2, runs_triton, tl

_ROWS = 32


@dataclass(frozen=True)
class NormedRows:
    """One module: W, A and B in the type of the activations, contiguous, and room for the lengths in fp32."""

    weight_OD: torch.Tensor
    a_PD: torch.Tensor
    b_OP: torch.Tensor
    norms_O: torch.Tensor


class RowNorms:
    """The modules of an adapter; their tensors stay where they are."""

    def __init__(self, modules: Sequence[NormedRows]) -> None:
        self._modules = modules
        device = modules[0].weight_OD.device
        lines = [(*_addresses(module), *module.weight_OD.shape, len(module.a_PD)) for module in modules]
        self._table_M7 = torch.tensor(lines, dtype=torch.int64, device=device)
        blocks = [(m, first) for m, module in enumerate(modules) for first in range(0, len(module.norms_O), _ROWS)]
        self._blocks_N2 = torch.tensor(blocks, dtype=torch.int32, device=device)
        self._widest = max(16, next_power_of_2(max(len(module.a_PD) for module in modules)))

    def measure(self) -> None:
        """Finds the lengths for A and B as they are."""
        if not runs_triton(self._table_M7):
            self.measure_plainly()
            return
        self.launch()

    def measure_plainly(self) -> None:
        """The twin of the kernel."""
        for module in self._modules:
            updated_OD = module.weight_OD.float() + module.b_OP.float() @ module.a_PD.float()
            module.norms_O.copy_(updated_OD.norm(dim=1))

    def launch(self) -> None:
        """The kernel."""
        _norms[(len(self._blocks_N2),)](
            self._table_M7,
            self._blocks_N2,
            self._modules[0].weight_OD,
            P=self._widest,
            BM=_ROWS,
            BK=128 if self._widest <= 64 else 32,
            num_warps=4,
        )


def _addresses(module: NormedRows) -> tuple[int, ...]:
    return tuple(t.data_ptr() for t in (module.weight_OD, module.a_PD, module.b_OP, module.norms_O))


@jit
def _norms(table, blocks, like, P: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):  # type: ignore[no-untyped-def]
    """`like`: any tensor of the weights' type."""
    block = blocks + tl.program_id(0) * 2
    line = table + tl.load(block).to(tl.int64) * 7
    kind: tl.constexpr = like.dtype.element_ty
    weight = tl.multiple_of(tl.load(line).to(tl.pointer_type(kind)), 16)
    a = tl.multiple_of(tl.load(line + 1).to(tl.pointer_type(kind)), 16)
    b = tl.load(line + 2).to(tl.pointer_type(kind))
    norms = tl.load(line + 3).to(tl.pointer_type(tl.float32))
    num_out, num_in, width = tl.load(line + 4), tl.load(line + 5), tl.load(line + 6)
    rows = tl.load(block + 1) + tl.arange(0, BM)
    ranks = tl.arange(0, P)
    row_mask, has = rows < num_out, ranks < width
    there = row_mask[:, None] & has[None, :]
    b_tile = tl.load(b + rows.to(tl.int64)[:, None] * width + ranks[None, :], mask=there, other=0.0)
    acc = tl.zeros((BM,), dtype=tl.float32)
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
        updated = tile.to(tl.float32) + tl.dot(b_tile, a_tile, input_precision="ieee")
        acc += tl.sum(updated * updated, axis=1)
    tl.store(norms + rows, tl.sqrt(acc), mask=row_mask)
