"""VeRA on the rows of one slot, in plain torch, its frozen random matrices, and its weights as kernels read them.

It is a LoRA with the frozen corner A of a shared matrix and with b ⊙ B ⊙ d in B's place, so forward and the gradient of
x are LoRA's. Of the gradient G = dyᵀ S that b ⊙ B ⊙ d would have, a sample leaves, with H = G ⊙ B,
    db += H d,    dd += Hᵀ b
in fp32 and in the job's order. So besides x only S is kept.

The two matrices hold the numbers that PEFT draws for the same key, rank and sizes. A (r, in) and B (out, r) are as
large as the largest inputs and outputs among an adapter's modules; each module reads a corner of them. They are drawn
once per process and device for all adapters with the same ones, and freed with the last of these adapters.

Kernels leave the gradient that b ⊙ B ⊙ d would have, and once a step it becomes those of b and d
(`kernels/methods/two_scales.py`). So on the fused path an adapter holds this product in two types. Modules with the
same corner of the shared B are taken together.

Shape suffixes: T rows of the microbatch, L rows of a slot or of a sample, M modules, D in, O out, R rank, P rank
padded."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch

from weft.adapters.adapter import Adapter
from weft.adapters.method import KernelCopy, LinearShape
from weft.adapters.routing import SlotRows
from weft.kernels.lora.tables import Entry, padded
from weft.kernels.methods.two_scales import scale, scales_grad
from weft.methods.lora.weights import LoraWeights


class Projection(dict[str, torch.Tensor]):
    """A and B in fp32, by PEFT's names."""

    @classmethod
    def of(cls, a_RD: torch.Tensor, b_OR: torch.Tensor) -> Projection:
        return cls(vera_A=a_RD, vera_B=b_OR)


_MADE: WeakValueDictionary[tuple[int, int, LinearShape, torch.device], Projection] = WeakValueDictionary()


def projection_for(key: int, rank: int, modules: Collection[LinearShape], device: torch.device) -> Projection:
    largest = max(num_out for num_out, _ in modules), max(num_in for _, num_in in modules)
    wanted = (key, rank, largest, device)
    found = _MADE.get(wanted)
    if found is None:
        found = Projection.of(*(matrix.to(device) for matrix in draw(key, rank, largest).values()))
        _MADE[wanted] = found
    return found


def draw(key: int, rank: int, largest: LinearShape) -> Projection:
    """A, then B, drawn on the CPU: a GPU's generator draws other numbers."""
    generator = torch.Generator().manual_seed(key)
    num_out, num_in = largest
    a_RD = _uniform((rank, num_in), generator)
    return Projection.of(a_RD, _uniform((num_out, rank), generator))


def _uniform(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    bound = math.sqrt(3.0) * (math.sqrt(2) / math.sqrt(shape[1]))
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


@dataclass
class VeraWeights(LoraWeights):
    d_R: torch.Tensor
    b_O: torch.Tensor
    grad_d_R: torch.Tensor
    grad_b_O: torch.Tensor

    def compute_weights(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a_RD.to(dtype), (self.b_O[:, None] * self.b_OR * self.d_R).to(dtype)

    def accumulate(
        self, rows: SlotRows, x_LD: torch.Tensor, s_LR: torch.Tensor, ds_LR: torch.Tensor, dy_TO: torch.Tensor
    ) -> None:
        for sample in rows.samples:
            h_OR = dy_TO[sample.buffer].t().float().mm(s_LR[sample.slot].float()).mul_(self.b_OR)
            self.grad_b_O.addmv_(h_OR, self.d_R)
            self.grad_d_R.addmv_(h_OR.t(), self.b_O)


class VeraCopy(KernelCopy):
    def __init__(self, adapter: Adapter, dtype: torch.dtype, modules: Mapping[str, VeraWeights]) -> None:
        super().__init__(adapter)
        nothing = torch.empty(0, device=adapter.device)
        a_of = _frozen_a(modules, dtype)
        self._alike: list[tuple[list[VeraWeights], torch.Tensor, torch.Tensor]] = []
        """Modules with the same corner, kernels' copies of their B (M, O, P), and its gradients (M, O, R)."""
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
        for own, b_MOP, _ in self._alike:
            scale(own[0].b_OR, *_vectors(own), b_MOP)

    def collect(self) -> None:
        """Computes gradients of b and d from those of B."""
        for own, _, grad_MOR in self._alike:
            of_b, of_d = scales_grad(grad_MOR, own[0].b_OR, *_vectors(own))
            torch._foreach_add_([w.grad_b_O for w in own], list(of_b))
            torch._foreach_add_([w.grad_d_R for w in own], list(of_d))

    def clear_gradients(self) -> None:
        for *_, grad_MOR in self._alike:
            grad_MOR.zero_()


def _vectors(own: Sequence[VeraWeights]) -> tuple[torch.Tensor, torch.Tensor]:
    """b (M, O) and d (M, R) of some modules."""
    return torch.stack([w.b_O for w in own]), torch.stack([w.d_R for w in own])


def _corner_b(w: VeraWeights) -> tuple[int, int]:
    """Number of a module's outputs on this device, and the first one's row in the shared B."""
    return len(w.b_O), int(w.b_OR.storage_offset())


def _frozen_a(modules: Mapping[str, VeraWeights], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A (P, D) of every module. Kernels read the A of adjacent modules as one matrix, so it is repeated once per
    module of a block, for all layers together."""
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
            number = 1 + max(index for other, index in found.values() if other == corner)
            made[corner] = torch.zeros(number, padded(rank), corner[0], dtype=dtype, device=w.d_R.device)
            made[corner][:, :rank] = w.a_RD
    return {path: made[corner][index] for path, (corner, index) in found.items()}


def compile_scales(rank: int, linears: Sequence[LinearShape], like: torch.Tensor) -> None:
    for num_out in dict.fromkeys(num_out for num_out, _ in linears):
        wide = like.new_empty(1, num_out, rank, dtype=torch.float32)
        vectors = wide[0], wide[:, :, 0].contiguous(), wide[:, 0]
        scale(*vectors, like.new_empty(1, num_out, padded(rank)))
        scales_grad(wide, *vectors)
