"""Costs of layers divided over devices: the operator graph of tensor parallelism, and gathering of sharded weights.

Adapters run beside the frozen products whose input they share, and an `add` joins both; an all-reduce follows each
partial result. Seconds are those of `AnalyticCost`, which knows the links.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from weft.plan.cost.analytic import PRODUCT_IN_STEP, AnalyticCost
from weft.plan.cost.hardware import Hardware
from weft.plan.cost.memory import GATHERED_LAYERS, MemoryModel

Kind = Literal["frozen", "adapter", "reduce"]


@dataclass(frozen=True, slots=True)
class Operator:
    name: str
    seconds: float
    kind: Kind
    needs: tuple[int, ...] = ()


Graph = tuple[Operator, ...]


def layer_graph(cost: AnalyticCost, lengths: Sequence[int], num_layers: int, *, is_forward: bool) -> Graph:
    """One microbatch through `num_layers` layers, forward or backward."""
    seconds = cost.layer(lengths, is_forward=is_forward)
    weights, widths = _shares(cost, [w * d for w, d in cost.shape.linears.values()]), _widths(cost)
    pass_s = (seconds.passes + seconds.launches) / 2
    # Attention and MLP: two sites each, with a computation between them.
    qkv, out, gates, down = range(4)
    halves = [(qkv, out, seconds.attention), (gates, down, 0.0)]
    if not is_forward:
        halves = [(last, first, between_s) for first, last, between_s in reversed(halves)]
    found: list[Operator] = []
    for layer in range(num_layers):
        for first, last, between_s in halves:
            for site, before_s, behind_s in ((first, pass_s, between_s), (last, 0.0, 0.0)):
                before = (len(found) - 1,) if found else ()
                name = f"{layer} {'/'.join(cost.shape.sites[site])}"
                added = []
                if seconds.adapters:
                    added.append(len(found))
                    found.append(Operator(f"{name} adapters", widths[site] * seconds.adapters, "adapter", before))
                added.append(len(found))
                found.append(Operator(name, before_s + weights[site] * seconds.products, "frozen", before))
                found.append(Operator(f"{name} add", behind_s, "frozen", tuple(added)))
            found.append(Operator(f"{name} all-reduce", seconds.reduces / 2, "reduce", (len(found) - 1,)))
    return tuple(found)


def _shares(cost: AnalyticCost, each: Sequence[int]) -> list[float]:
    sizes = dict(zip(cost.shape.linears, each, strict=True))
    total = sum(sizes.values()) or 1
    return [sum(sizes[name] for name in site) / total for site in cost.shape.sites]


def _widths(cost: AnalyticCost) -> list[float]:
    chosen = cost.shape.chosen(cost.targets)
    return _shares(cost, [sum(shape) if name in chosen else 0 for name, shape in cost.shape.linears.items()])


@dataclass(frozen=True)
class GatherCost:
    memory: MemoryModel
    hardware: Hardware

    @property
    def product_flop(self) -> float:
        fp8 = self.hardware.fp8_flop if self.memory.quantize == "fp8" else None
        return PRODUCT_IN_STEP * (fp8 or self.hardware.product_flop)

    @property
    def others(self) -> float:
        return 1 - 1 / self.memory.shards

    @property
    def layer_bytes(self) -> float:
        return self.memory.shape.layer_weights * self.memory.weight_bytes_each * self.others

    @property
    def layer_s(self) -> float:
        return self.hardware.send_s(self.layer_bytes)

    @property
    def hidden_from_tokens(self) -> int:
        """Tokens of a microbatch whose products take as long as gathering."""
        return math.ceil(self.layer_s * self.product_flop / (2 * self.memory.shape.layer_weights))

    def notes(self) -> tuple[str, str]:
        """A device's part of the backbone, and the size from which gathering is hidden, with the arithmetic."""
        memory = self.memory
        whole = replace(memory, shards=1, num_stages=1, split=None).weight_bytes()
        held = max(memory.weight_bytes(stage) for stage in range(memory.num_stages))
        up_to = "up to " if memory.num_stages > 1 else ""
        tables = "embedding or head," if memory.num_stages > 1 else "embedding, head"
        return (
            f"each of {memory.shards * memory.num_stages} devices holds {up_to}about {held / 2**20:,.1f} MiB of the "
            f"backbone's {whole / 2**20:,.1f}: its slices, {GATHERED_LAYERS} layers, {tables} and norms.",
            f"{self._hidden_in_words()}.",
        )

    def _hidden_in_words(self) -> str:
        link, flop = self.hardware.link_rate / 1e9, self.product_flop / 1e12
        later = f" and {self.hardware.link_s * 1e6:,.0f} us a layer" if self.hardware.link_s else ""
        return (
            f"gathering a layer ({self.layer_bytes / 1e6:,.1f} MB of other devices) is hidden from "
            f"{self.hidden_from_tokens:,} tokens a microbatch on: {self.memory.weight_bytes_each:g} bytes / 2 FLOP x "
            f"{self.memory.shards - 1}/{self.memory.shards} x {flop:,.3g} TFLOP/s / {link:,.3g} GB/s{later} "
            f"({self.hardware.name}, links {self.hardware.links})"
        )


@dataclass(frozen=True)
class ShardCost:
    """A `CostModel` of a device that gathers its layers from others while it computes with them."""

    cost: AnalyticCost
    num_shards: int

    @property
    def memory(self) -> MemoryModel:
        return replace(self.cost.memory, shards=self.num_shards)

    def gather_s(self, stage: int = 0) -> float:
        """Seconds to gather all layers of a stage, one way."""
        return self.memory.layers(stage) * GatherCost(self.memory, self.cost.hardware).layer_s

    def forward_s(self, lengths: Sequence[int], stage: int) -> float:
        """Seconds of the slower of computing and gathering."""
        return max(self.cost.forward_s(lengths, stage), self.gather_s(stage)) if lengths else 0.0

    def backward_s(self, lengths: Sequence[int], stage: int) -> float:
        return max(self.cost.backward_s(lengths, stage), self.gather_s(stage)) if lengths else 0.0

    def transfer_s(self, num_tokens: int) -> float:
        return self.cost.transfer_s(num_tokens)

    def step_s(self, stage: int) -> float:
        return self.cost.step_s(stage)

    def held_bytes(self, lengths: Sequence[int], stage: int) -> int:
        return self.cost.held_bytes(lengths, stage)
