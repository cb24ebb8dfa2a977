"""What planners and the simulator ask of a cost model.

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
        """One microbatch forward through one stage."""
        ...

    def backward_s(self, lengths: Sequence[int], stage: int) -> float:
        """The same, backward: input gradients and the adapters' own."""
        ...

    def transfer_s(self, num_tokens: int) -> float:
        """Activations, or their gradients, of so many tokens from one stage to the next."""
        ...

    def step_s(self, stage: int) -> float:
        """One job's optimizer step on one stage."""
        ...

    def held_bytes(self, lengths: Sequence[int], stage: int) -> int:
        """What a stage keeps of a microbatch between its forward and its backward."""
        ...


def slot_seconds(cost: CostModel, num_stages: int, lengths: Sequence[int]) -> float:
    """A microbatch forward and backward on the slowest stage, with its transfers: the time between two of them in a
    pipeline that never waits."""
    slowest = max(cost.forward_s(lengths, stage) + cost.backward_s(lengths, stage) for stage in range(num_stages))
    return slowest + (2 * cost.transfer_s(sum(lengths)) if num_stages > 1 else 0.0)


@dataclass(frozen=True)
class LinearCost:
    """The simplest model: so much per microbatch, per token and per squared token, the same on every stage."""

    fixed_s: float = 0.0
    """Per microbatch and pass, however full: launches, the weights' way through memory."""
    token_s: float = 1.0
    pair_s: float = 0.0
    """Per squared length of a sample: attention."""
    backward_ratio: float = 1.0
    """Backward over forward. With frozen weights only input gradients are computed, so about 1."""
    send_s: float = 0.0
    """Per token between stages."""
    optimizer_s: float = 0.0
    token_bytes: int = 1

    def forward_s(self, lengths: Sequence[int], stage: int) -> float:
        """One microbatch forward through one stage."""
        pairs: int = sum(map(mul, lengths, lengths))
        return self.fixed_s + self.token_s * sum(lengths) + self.pair_s * pairs

    def backward_s(self, lengths: Sequence[int], stage: int) -> float:
        """The same, backward."""
        return self.backward_ratio * self.forward_s(lengths, stage)

    def transfer_s(self, num_tokens: int) -> float:
        """Activations of so many tokens from one stage to the next."""
        return self.send_s * num_tokens

    def step_s(self, stage: int) -> float:
        """One job's optimizer step on one stage."""
        return self.optimizer_s

    def held_bytes(self, lengths: Sequence[int], stage: int) -> int:
        """What a stage keeps of a microbatch between forward and backward."""
        return self.token_bytes * sum(lengths)
