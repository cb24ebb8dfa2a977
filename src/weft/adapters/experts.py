"""The sites of routed experts, and the rows that a router has sent to them.

A router sends each row to K experts. The T · K choices of a microbatch are sorted by expert, and those of one expert
by row, so the rows that one sample has at one expert are neighbours. A frozen product takes the rows of an expert
together, of all jobs; an adapter takes one sample's rows at a time (`SampleChoices`).

Shape suffixes: T rows of the microbatch, K choices of a row, S = T · K, P choices of one sample, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from weft.adapters.devices import SiteShare
from weft.adapters.method import LinearShape, SlotHolder
from weft.adapters.routing import SlotRows
from weft.settings import DOWN, GATE, GATE_UP, UP


@dataclass(frozen=True, slots=True)
class SampleChoices:
    """The choices of one sample."""

    index_P: torch.Tensor
    """Their indices among all choices, ascending."""
    ends_E: torch.Tensor
    """For each expert the index after the last of these choices that are its."""
    ends_1: torch.Tensor
    """The number of choices: the end of the one group that they are for a factor that experts share."""


@dataclass(frozen=True, slots=True)
class ExpertRows(SlotRows):
    """Neighbouring segments of one slot, with the choices of each sample."""

    choices: tuple[SampleChoices, ...] = ()


@dataclass(frozen=True)
class Dispatch:
    """The choices of a microbatch, sorted by expert."""

    order_S: torch.Tensor
    """Choices in the order of their experts, as indices into (T, K)."""
    inverse_S: torch.Tensor
    """Inverse of `order_S`."""
    expert_S: torch.Tensor
    """Expert of each choice in `order_S`."""
    ends_E: torch.Tensor
    num_choices: int
    """Number of experts that each token chooses (K)."""

    @classmethod
    def of(cls, index_TK: torch.Tensor, num_experts: int) -> Dispatch:
        expert_S, order_S = torch.sort(index_TK.flatten(), stable=True)
        inverse_S = torch.empty_like(order_S)
        inverse_S[order_S] = torch.arange(len(order_S), device=order_S.device)
        return cls(order_S, inverse_S, expert_S, _ends(expert_S, num_experts), index_TK.shape[1])

    def rows_of(self, rows: SlotRows) -> ExpertRows:
        """The rows of a slot with their choices."""
        own = {field.name: getattr(rows, field.name) for field in fields(SlotRows)}
        return ExpertRows(**own, choices=tuple(self._choices(sample.buffer) for sample in rows.samples))

    def _choices(self, sample: slice) -> SampleChoices:
        choices = slice(sample.start * self.num_choices, sample.stop * self.num_choices)
        index_P = self.inverse_S[choices].sort().values
        ends_1 = torch.full((1,), len(index_P), dtype=torch.int32, device=index_P.device)
        return SampleChoices(index_P, _ends(self.expert_S[index_P], len(self.ends_E)), ends_1)


def _ends(expert_S: torch.Tensor, num_experts: int) -> torch.Tensor:
    """For each expert the number of sorted choices that are its or an earlier one's; counted on the device."""
    experts_E = torch.arange(num_experts, device=expert_S.device, dtype=expert_S.dtype)
    return torch.searchsorted(expert_S, experts_E, right=True, out_int32=True)


class ExpertSite(SlotHolder):
    """One product of all experts of a layer, or some columns of it, where adapters sit."""

    bias_O = weight = read_original = None

    def __init__(self, num_experts: int, num_in: int, num_out: int, columns: slice) -> None:
        """`columns`: its outputs among those of the frozen product."""
        self.num_experts, self.in_features, self.out_features = num_experts, num_in, num_out
        self.columns = columns
        self.share = SiteShare.whole(num_out, num_in)
        self.slots = {}

    @property
    def shape(self) -> LinearShape:
        return self.num_experts, self.out_features, self.in_features


def sites_of(module: Any) -> dict[str, dict[str, ExpertSite]]:
    """The sites of a module of experts by name, by the frozen product that has their columns."""
    frozen_in, frozen_out = _sizes(module, GATE_UP if module.has_gate else UP)
    num_experts, columns = module.num_experts, slice(0, frozen_out)
    down_in, down_out = _sizes(module, DOWN)
    down = {DOWN: ExpertSite(num_experts, down_in, down_out, slice(0, down_out))}
    if not module.has_gate:
        return {UP: {UP: ExpertSite(num_experts, frozen_in, frozen_out, columns)}, DOWN: down}
    half = frozen_out // 2
    gate, up = slice(0, half), slice(half, frozen_out)
    if not module.is_concatenated:
        gate, up = slice(0, frozen_out, 2), slice(1, frozen_out, 2)
    gated = {
        GATE_UP: ExpertSite(num_experts, frozen_in, frozen_out, columns),
        GATE: ExpertSite(num_experts, frozen_in, half, gate),
        UP: ExpertSite(num_experts, frozen_in, half, up),
    }
    return {GATE_UP: gated, DOWN: down}


def _sizes(module: Any, name: str) -> tuple[int, int]:
    """(in, out) of one expert's product."""
    _, *sizes = getattr(module, name).shape
    num_in, num_out = sizes if module.is_transposed else reversed(sizes)
    return num_in, num_out
