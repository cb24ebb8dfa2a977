"""One job's LoRA weights: fp32 masters and gradients in two flat buffers, viewed module by module.

Per adapted module W (out, in): A (r, in), B (out, r); the module computes x Wᵀ + scale · drop(x) Aᵀ Bᵀ.
All A of an adapter lie in one buffer and all B in another, so that one optimizer call steps the whole adapter, and
LoRA+ needs no more than two learning rates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from weft.errors import AdapterFileError, ConfigError
from weft.kernels.dropout import mix, module_key
from weft.spec import AdapterSpec

LinearShape = tuple[int, int]
"""(out, in) of a linear module."""


@dataclass
class LoraWeights:
    """The adapter on one module: views into its flat buffers."""

    a_RD: torch.Tensor
    b_OR: torch.Tensor
    grad_a_RD: torch.Tensor
    grad_b_OR: torch.Tensor
    scale: float
    dropout: float
    key: int
    """Stable number of the module, part of every dropout key."""

    def compute(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """A and B in the type of the activations."""
        if dtype is torch.float32:
            return self.a_RD, self.b_OR
        return self.a_RD.to(dtype), self.b_OR.to(dtype)


def check_ranks(spec: AdapterSpec, modules: Mapping[str, LinearShape]) -> None:
    """ConfigError if a rank is above what a module can have."""
    for path, shape in modules.items():
        rank = spec.rank_for(path)
        if rank > min(shape):
            raise ConfigError(
                f"rank {rank} is above the smaller side of {path} ({shape[0]} x {shape[1]}).",
                where="adapter.r" if rank == spec.r else "adapter.rank_pattern",
            )


class Adapter:
    """The trainable parameters of one job on one backbone."""

    def __init__(self, spec: AdapterSpec, modules: Mapping[str, LinearShape], seed: int, device: torch.device) -> None:
        """Modules: path and (out, in) of every adapted linear, in the backbone's order."""
        self.spec = spec
        check_ranks(spec, modules)
        num_a = sum(spec.rank_for(path) * shape[1] for path, shape in modules.items())
        num_b = sum(spec.rank_for(path) * shape[0] for path, shape in modules.items())
        self._shapes = dict(modules)
        self.modules: dict[str, LoraWeights] = {}
        self._take(torch.zeros(num_a, device=device), torch.zeros(num_b, device=device))
        self.version = 0
        """Counts the changes of the weights, for those who keep a copy."""
        self._initialise(seed)

    def changed(self) -> None:
        """To be called after the weights were written to."""
        self.version += 1

    @property
    def num_parameters(self) -> int:
        """Trainable numbers."""
        return self.params_a.numel() + self.params_b.numel()

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self.grad_a.zero_()
        self.grad_b.zero_()

    def tensors(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Copies of (A, B) on the CPU, by module path."""
        return {path: (w.a_RD.cpu().clone(), w.b_OR.cpu().clone()) for path, w in self.modules.items()}

    def load(self, tensors: Mapping[str, tuple[torch.Tensor, torch.Tensor]], where: str) -> None:
        """Takes (A, B) of every module; modules and shapes must be this adapter's."""
        for path in sorted(self.modules.keys() ^ tensors.keys()):
            side = "is not in the file" if path in self.modules else "is not a module of this adapter"
            raise AdapterFileError(f"{path} {side}; target_modules must be those it was trained with.", where=where)
        for path, (a, b) in tensors.items():
            mine = self.modules[path]
            if a.shape != mine.a_RD.shape or b.shape != mine.b_OR.shape:
                raise AdapterFileError(
                    f"{path} has A {tuple(a.shape)} and B {tuple(b.shape)}; expected {tuple(mine.a_RD.shape)} and "
                    f"{tuple(mine.b_OR.shape)}.",
                    where=where,
                )
            mine.a_RD.copy_(a)
            mine.b_OR.copy_(b)
        self.changed()

    def move_to(self, device: torch.device) -> None:
        """Takes the weights to a device, bit by bit, and forgets the gradients; no slot may hold the adapter."""
        self._take(self.params_a.to(device, copy=True), self.params_b.to(device, copy=True))
        self.changed()

    def _take(self, params_a: torch.Tensor, params_b: torch.Tensor) -> None:
        """Makes these the weights, with fresh gradients beside them; without the memory for it, nothing changes."""
        grad_a, grad_b = torch.zeros_like(params_a), torch.zeros_like(params_b)
        self.params_a, self.params_b, self.grad_a, self.grad_b = params_a, params_b, grad_a, grad_b
        sizes_a = [self.spec.rank_for(path) * shape[1] for path, shape in self._shapes.items()]
        sizes_b = [self.spec.rank_for(path) * shape[0] for path, shape in self._shapes.items()]
        pieces = zip(
            self._shapes.items(),
            params_a.split(sizes_a),
            params_b.split(sizes_b),
            grad_a.split(sizes_a),
            grad_b.split(sizes_b),
            strict=True,
        )
        for (path, (num_out, num_in)), a, b, grad_a_piece, grad_b_piece in pieces:
            rank = self.spec.rank_for(path)
            self.modules[path] = LoraWeights(
                a.view(rank, num_in),
                b.view(num_out, rank),
                grad_a_piece.view(rank, num_in),
                grad_b_piece.view(num_out, rank),
                self.spec.scale_for(path),
                self.spec.lora_dropout,
                module_key(path),
            )

    def _initialise(self, seed: int) -> None:
        """PEFT's starting values, drawn per module from the job's seed: no module's depends on the others."""
        for w in self.modules.values():
            generator = torch.Generator().manual_seed(mix(seed, w.key, 0x1417))
            a, b = _initial(self.spec, tuple(w.a_RD.shape), tuple(w.b_OR.shape), generator)
            w.a_RD.copy_(a)
            w.b_OR.copy_(b)


def _initial(
    spec: AdapterSpec, shape_a: tuple[int, ...], shape_b: tuple[int, ...], generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    rank, num_in = shape_a

    def uniform(shape: tuple[int, ...]) -> torch.Tensor:
        # Kaiming-uniform with a = sqrt(5), the start of every torch Linear: uniform in ±1/sqrt(fan_in).
        return (torch.rand(shape, generator=generator) * 2 - 1) / math.sqrt(shape[1])

    if spec.init_lora_weights == "gaussian":
        return torch.randn(shape_a, generator=generator) / rank, torch.zeros(shape_b)
    if spec.init_lora_weights == "orthogonal":
        # A lives on one half of an orthogonal basis of rank space and B on the other, so B·A starts at zero.
        basis = torch.linalg.qr(torch.randn(rank, rank, generator=generator))[0]
        a = basis[0::2].t() @ torch.randn(rank // 2, num_in, generator=generator) / 10
        b = torch.randn(shape_b[0], rank // 2, generator=generator) @ basis[1::2] / 10
        return a, b
    if spec.init_lora_weights is False:
        return uniform(shape_a), uniform(shape_b)
    return uniform(shape_a), torch.zeros(shape_b)
