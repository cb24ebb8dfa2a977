"""The two frozen random matrices of VeRA, the numbers that PEFT draws for the same key, rank and sizes.

A (r, in) and B (out, r) are as large as the largest inputs and outputs among an adapter's modules; each module reads a
corner of them. They are made once per process and device for all adapters that have the same ones, and forgotten with
the last of these adapters.

Shape suffixes: D most inputs, O most outputs, R rank.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from weakref import WeakValueDictionary

import torch

from weft.adapters.method import LinearShape


class Projection(dict[str, torch.Tensor]):
    """A and B in fp32, by PEFT's names."""

    @classmethod
    def of(cls, a_RD: torch.Tensor, b_OR: torch.Tensor) -> Projection:
        """The two."""
        return cls(vera_A=a_RD, vera_B=b_OR)


_MADE: WeakValueDictionary[tuple[int, int, LinearShape, torch.device], Projection] = WeakValueDictionary()


def projection_for(key: int, rank: int, modules: Collection[LinearShape], device: torch.device) -> Projection:
    """The one for an adapter on modules of these sizes."""
    largest = max(num_out for num_out, _ in modules), max(num_in for _, num_in in modules)
    wanted = (key, rank, largest, device)
    found = _MADE.get(wanted)
    if found is None:
        found = Projection.of(*(matrix.to(device) for matrix in draw(key, rank, largest).values()))
        _MADE[wanted] = found
    return found


def draw(key: int, rank: int, largest: LinearShape) -> Projection:
    """First A, then B, on the CPU: a generator of a GPU draws other numbers."""
    generator = torch.Generator().manual_seed(key)
    num_out, num_in = largest
    a_RD = _uniform((rank, num_in), generator)
    return Projection.of(a_RD, _uniform((num_out, rank), generator))


def _uniform(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """Kaiming's uniform numbers for a rectifier."""
    bound = math.sqrt(3.0) * (math.sqrt(2) / math.sqrt(shape[1]))
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)
