"""What gathering sharded weights takes, and from how many tokens on it is hidden behind the products.

Of one layer with W weights of b bytes, on N devices, over T tokens:
    gathered   b·W·(N - 1)/N bytes over the link, while the layer before is worked on
    products   2·W·T FLOP forward, and as many backward
So gathering is hidden where T is at least b/2 · (N - 1)/N · (product rate / link rate), whatever W is. Attention and
adapters take time besides: the true number is below it. Links are assumed: they are those of the hardware table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.plan.cost.analytic import PRODUCT_IN_STEP, AnalyticCost
from weft.plan.cost.hardware import Hardware
from weft.plan.cost.memory import GATHERED_LAYERS, MemoryModel


@dataclass(frozen=True)
class GatherCost:
    """Gathering on one kind of device; the memory model says over how many, and how weights are stored."""

    memory: MemoryModel
    hardware: Hardware

    @property
    def product_flop(self) -> float:
        """Of a layer's products, a second."""
        fp8 = self.hardware.fp8_flop if self.memory.quantize == "fp8" else None
        return PRODUCT_IN_STEP * (fp8 or self.hardware.product_flop)

    @property
    def others(self) -> float:
        """The part of a layer that other devices hold."""
        return 1 - 1 / self.memory.shards

    @property
    def layer_bytes(self) -> float:
        """Of one layer, over the link."""
        return self.memory.shape.layer_weights * self.memory.weight_bytes_each * self.others

    @property
    def layer_s(self) -> float:
        """Until a layer is here."""
        return self.layer_bytes / self.hardware.link_rate

    @property
    def hidden_from_tokens(self) -> int:
        """Tokens of a microbatch whose products take as long as gathering does."""
        each = self.memory.weight_bytes_each * self.others / 2
        return math.ceil(each * self.product_flop / self.hardware.link_rate)

    def notes(self) -> tuple[str, str]:
        """What a device holds of the backbone, and from where on gathering is hidden, with the arithmetic."""
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
        return (
            f"gathering a layer ({self.layer_bytes / 1e6:,.1f} MB of other devices) is hidden from "
            f"{self.hidden_from_tokens:,} tokens a microbatch on: {self.memory.weight_bytes_each:g} bytes / 2 FLOP x "
            f"{self.memory.shards - 1}/{self.memory.shards} x {flop:,.3g} TFLOP/s / {link:,.3g} GB/s "
            f"({self.hardware.name}, links assumed)"
        )


@dataclass(frozen=True)
class ShardCost:
    """A `CostModel` of a device that gathers its layers from others while it computes with them."""

    cost: AnalyticCost
    """Of the same device with all weights of its own."""
    num_shards: int

    @property
    def memory(self) -> MemoryModel:
        """The bytes that go with it."""
        return replace(self.cost.memory, shards=self.num_shards)

    def gather_s(self, stage: int = 0) -> float:
        """All layers of a stage, one way."""
        return self.memory.layers(stage) * GatherCost(self.memory, self.cost.hardware).layer_s

    def forward_s(self, lengths: Sequence[int], stage: int) -> float:
        """One microbatch forward: the slower of computing and gathering."""
        return max(self.cost.forward_s(lengths, stage), self.gather_s(stage)) if lengths else 0.0

    def backward_s(self, lengths: Sequence[int], stage: int) -> float:
        """The same, backward."""
        return max(self.cost.backward_s(lengths, stage), self.gather_s(stage)) if lengths else 0.0

    def transfer_s(self, num_tokens: int) -> float:
        """From one stage to the next."""
        return self.cost.transfer_s(num_tokens)

    def step_s(self, stage: int) -> float:
        """One job's optimizer step."""
        return self.cost.step_s(stage)

    def held_bytes(self, lengths: Sequence[int], stage: int) -> int:
        """What is kept of a microbatch between its forward and its backward."""
        return self.cost.held_bytes(lengths, stage)
