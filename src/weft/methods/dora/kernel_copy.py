"""A DoRA as kernels read it: a LoRA whose outputs u + bias are multiplied with g = m / n and shifted by (1 - g) ⊙ bias.

n, the lengths of the rows of W + s B A, are found once a step, of A and B as the kernels see them. Kernels leave
G = Σ dy ⊙ (u + bias) and, where there is a bias, H = Σ dy; once a step they become dm += (G - bias ⊙ H) / n.
Where devices share the inputs of modules, each finds the lengths of its part of their rows; the squares add up.

Shape suffixes: N outputs of all modules, O out, R rank, P rank padded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from weft.adapters.frozen import Dense
from weft.adapters.linear import SlotLinear
from weft.adapters.method import LinearShape
from weft.kernels.lora.tables import padded
from weft.kernels.methods.parts import ColumnChange, OtherParts
from weft.kernels.methods.row_norms import NormedRows, RowNorms
from weft.methods.dora.weights import DoraWeights
from weft.methods.lora.compute_copy import ComputeCopy

if TYPE_CHECKING:
    from weft.adapters.adapter import Adapter


class DoraCopy(ComputeCopy):
    """What kernels read of one adapter, and where they leave the gradients of its lengths."""

    def __init__(self, adapter: Adapter, dtype: torch.dtype, modules: Mapping[str, DoraWeights]) -> None:
        """`modules`: by path."""
        self._own = modules
        super().__init__(adapter, dtype, {path: w.lora for path, w in modules.items()})
        num_outputs = sum(len(w.m_O) for w in modules.values())
        m_N = torch.zeros(num_outputs, device=adapter.device)
        self._norms_N, self._factors_N, self._grad_N = (torch.zeros_like(m_N) for _ in range(3))
        self._bias_N = self._shifts_N = self._sums_N = None
        if any(w.place.bias_O is not None for w in modules.values()):
            self._bias_N, self._shifts_N, self._sums_N = (torch.zeros_like(m_N) for _ in range(3))
            for bias_O, w in zip(self._split(self._bias_N), modules.values(), strict=True):
                if w.place.bias_O is not None:
                    bias_O.copy_(w.place.bias_O)
        buffers = (self._factors_N, self._shifts_N, self._grad_N, self._sums_N)
        views = [self._split(buffer) if buffer is not None else [None] * len(modules) for buffer in buffers]
        # A weight that is stored otherwise is made dense for a moment, each in turn.
        is_dense = all(isinstance(w.place, SlotLinear) and isinstance(w.place.frozen, Dense) for w in modules.values())
        self._row_norms = RowNorms([self._normed(path) for path in modules]) if is_dense else None
        self.others = OtherParts(
            {path: ColumnChange(*own) for path, own in zip(modules, zip(*views, strict=True), strict=True)}
        )

    def copy_weights(self) -> None:
        """A and scale · B, then the lengths and what follows from them."""
        super().copy_weights()
        if self._row_norms is not None:
            self._row_norms.measure()
        else:
            for path in self._own:
                RowNorms([self._normed(path)]).measure()
        self._make_whole()
        torch.div(torch.cat([w.m_O for w in self._own.values()]), self._norms_N, out=self._factors_N)
        if self._bias_N is not None and self._shifts_N is not None:
            torch.mul(self._bias_N, 1 - self._factors_N, out=self._shifts_N)

    def collect(self) -> None:
        """Adds to the gradients of the lengths."""
        if self._bias_N is not None and self._sums_N is not None:
            self._grad_N.addcmul_(self._bias_N, self._sums_N, value=-1)
        grads, lengths = self._split(self._grad_N), self._split(self._norms_N)
        torch._foreach_addcdiv_([w.grad_m_O for w in self._own.values()], grads, lengths)
        super().collect()
        self._forget_sums()

    def clear_gradients(self) -> None:
        """LoRA's, and both sums."""
        super().clear_gradients()
        self._forget_sums()

    def _forget_sums(self) -> None:
        self._grad_N.zero_()
        if self._sums_N is not None:
            self._sums_N.zero_()

    def _make_whole(self) -> None:
        """Makes lengths of parts of rows those of the rows."""
        pairs = zip(self._split(self._norms_N), self._own.values(), strict=True)
        parts = [(norms_O, w.place.share) for norms_O, w in pairs if not w.place.share.has_all_inputs]
        if parts:
            squares = parts[0][1].over_inputs(torch.cat([norms_O for norms_O, _ in parts]).square_())
            lengths = squares.sqrt_().split([len(norms_O) for norms_O, _ in parts])
            torch._foreach_copy_([norms_O for norms_O, _ in parts], lengths)

    def _normed(self, path: str) -> NormedRows:
        """A module with room for its lengths."""
        weight_OD, entry = self._own[path].place.weight, self.entries[path]
        assert weight_OD is not None, "checked when the adapter was made"
        norms_O = self._split(self._norms_N)[list(self._own).index(path)]
        return NormedRows(weight_OD.detach(), entry.a_PD, entry.b_OP, norms_O)

    def _split(self, flat_N: torch.Tensor) -> list[torch.Tensor]:
        return list(flat_N.split([len(w.m_O) for w in self._own.values()]))


def compile_norms(rank: int, linears: Sequence[LinearShape], like: torch.Tensor) -> None:
    """Launches what finds the lengths of adapters of a rank."""
    width = padded(rank)
    RowNorms(
        [
            NormedRows(
                like.new_empty(num_out, num_in),
                like.new_empty(width, num_in),
                like.new_empty(num_out, width),
                like.new_empty(num_out, dtype=torch.float32),
            )
            for num_out, num_in in linears
        ]
    ).measure()
