"""The cost model interface of planners and the simulator.

A microbatch is described by the lengths of its samples, since attention costs the sum of their squares and all else the
sum of them. Stages of a pipeline are counted from 0; a backbone in one piece is a single stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from typing import Protocol


class CostModel(Protocol):
    """Predicts seconds and bytes; deterministic."""

    def forward_s(self, lengths: Sequence[int], stage: int) -> float:
        """Seconds of one microbatch through one stage."""

    def backward_s(self, lengths: Sequence[int], stage: int) -> float:
        """Seconds of the backward pass: input gradients and the adapters' own."""

    def transfer_s(self, num_tokens: int) -> float:
        """Seconds to send activations, or their gradients, from one stage to the next."""

    def step_s(self, stage: int) -> float:
        """Seconds of one job's optimizer step on one stage."""

    def held_bytes(self, lengths: Sequence[int], stage: int) -> int: ...


def slot_seconds(cost: CostModel, num_stages: int, lengths: Sequence[int]) -> float:
    """Seconds of a microbatch on the slowest stage, with its transfers: the interval in a pipeline that never waits."""
    slowest = max(cost.forward_s(lengths, stage) + cost.backward_s(lengths, stage) for stage in range(num_stages))
    return slowest + (2 * cost.transfer_s(sum(lengths)) if num_stages > 1 else 0.0)


@dataclass(frozen=True)
class LinearCost:
    """The simplest model: a cost per microbatch, per token and per squared length, equal on all stages."""

    fixed_s: float = 0.0
    """Seconds per microbatch and pass, however full: launches, reading the weights."""
    token_s: float = 1.0
    pair_s: float = 0.0
    """Seconds per squared length of a sample: attention."""
    backward_ratio: float = 1.0
    """Ratio of backward to forward; about 1 with frozen weights, which need only input gradients."""
    send_s: float = 0.0
    """Seconds per token sent between stages."""
    optimizer_s: float = 0.0
    token_bytes: int = 1

    def forward_s(self, lengths: Sequence[int], stage: int) -> float:
        pairs: int = sum(map(mul, lengths, lengths))
        return self.fixed_s + self.token_s * sum(lengths) + self.pair_s * pairs

    def backward_s(self, lengths: Sequence[int], stage: int) -> float:
        return self.backward_ratio * self.forward_s(lengths, stage)

    def transfer_s(self, num_tokens: int) -> float:
        return self.send_s * num_tokens

    def step_s(self, stage: int) -> float:
        return self.optimizer_s

    def held_bytes(self, lengths: Sequence[int], stage: int) -> int:
        return self.token_bytes * sum(lengths)
