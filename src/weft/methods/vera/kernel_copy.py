"""A VeRA as kernels read it: a LoRA with the frozen A of all modules and with b ⊙ B ⊙ d in B's place.

Kernels leave the gradient that this B would have, and once a step it becomes those of b and d
(`kernels/methods/two_scales.py`). So on this path an adapter holds its B in two types. Modules with the same corner of
the shared B are taken together.

Shape suffixes: M modules, D in, O out, R rank, P rank padded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from weft.adapters.method import KernelCopy, LinearShape
from weft.kernels.lora.tables import Entry, padded
from weft.kernels.methods.two_scales import scale, scales_grad
from weft.methods.vera.weights import VeraWeights

if TYPE_CHECKING:
    from weft.adapters.adapter import Adapter


class VeraCopy(KernelCopy):
    """What kernels read of one adapter, and where they leave gradients."""

    def __init__(self, adapter: Adapter, dtype: torch.dtype, modules: Mapping[str, VeraWeights]) -> None:
        """`modules`: by path."""
        super().__init__(adapter)
        nothing = torch.empty(0, device=adapter.device)
        a_of = _frozen_a(modules, dtype)
        self._alike: list[tuple[list[VeraWeights], torch.Tensor, torch.Tensor]] = []
        """Modules with the same corner, what kernels read of their B (M, O, P), and its gradients (M, O, R)."""
        for corner in dict.fromkeys(_corner_b(w) for w in modules.values()):
            paths = [path for path, w in modules.items() if _corner_b(w) == corner]
            num_out, rank = corner[0], len(modules[paths[0]].d_R)
            b_MOP = torch.zeros(len(paths), num_out, padded(rank), dtype=dtype, device=adapter.device)
            grad_MOR = torch.zeros(len(paths), num_out, rank, device=adapter.device)
            self._alike.append(([modules[path] for path in paths], b_MOP, grad_MOR))
            for path, b_OP, grad_OR in zip(paths, b_MOP, grad_MOR, strict=True):
                w = modules[path]
                self.entries[path] = Entry(
                    rank, a_of[path], b_OP, nothing, grad_OR, 1.0, w.dropout, w.key, first_input=w.first_input
                )
        # In the modules' order again.
        self.entries = {path: self.entries[path] for path in modules}

    def copy_weights(self) -> None:
        """Makes b ⊙ B ⊙ d."""
        for own, b_MOP, _ in self._alike:
            scale(own[0].b_OR, *_vectors(own), b_MOP)

    def collect(self) -> None:
        """Makes gradients of b and d out of those that B has got."""
        for own, _, grad_MOR in self._alike:
            of_b, of_d = scales_grad(grad_MOR, own[0].b_OR, *_vectors(own))
            torch._foreach_add_([w.grad_b_O for w in own], list(of_b))
            torch._foreach_add_([w.grad_d_R for w in own], list(of_d))

    def clear_gradients(self) -> None:
        """Those of B."""
        for *_, grad_MOR in self._alike:
            grad_MOR.zero_()


def _vectors(own: Sequence[VeraWeights]) -> tuple[torch.Tensor, torch.Tensor]:
    """b (M, O) and d (M, R) of some modules."""
    return torch.stack([w.b_O for w in own]), torch.stack([w.d_R for w in own])


def _corner_b(w: VeraWeights) -> tuple[int, int]:
    """How many outputs a module has here, and where they begin in the shared B."""
    return len(w.b_O), int(w.b_OR.storage_offset())


def _frozen_a(modules: Mapping[str, VeraWeights], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A (P, D) of every module: kernels read those of modules side by side as one matrix, so there are as many copies
    one after another as a block has such modules, for all layers together."""
    found: dict[str, tuple[tuple[int, int], int]] = {}
    among: Counter[tuple[str, tuple[int, int]]] = Counter()
    for path, w in modules.items():
        key = path.rpartition(".")[0], (w.a_RD.shape[1], w.first_input)
        found[path] = key[1], among[key]
        among[key] += 1
    made: dict[tuple[int, int], torch.Tensor] = {}
    for path, w in modules.items():
        corner, rank = found[path][0], len(w.d_R)
        if corner not in made:
            number = 1 + max(place for other, place in found.values() if other == corner)
            made[corner] = torch.zeros(number, padded(rank), corner[0], dtype=dtype, device=w.d_R.device)
            made[corner][:, :rank] = w.a_RD
    return {path: made[corner][place] for path, (corner, place) in found.items()}


def compile_scales(rank: int, linears: Sequence[LinearShape], like: torch.Tensor) -> None:
    """Launches what makes B of adapters of a rank, and what takes its gradient apart."""
    for num_out in dict.fromkeys(num_out for num_out, _ in linears):
        wide = like.new_empty(1, num_out, rank, dtype=torch.float32)
        vectors = wide[0], wide[:, :, 0].contiguous(), wide[:, 0]
        scale(*vectors, like.new_empty(1, num_out, padded(rank)))
        scales_grad(wide, *vectors)
