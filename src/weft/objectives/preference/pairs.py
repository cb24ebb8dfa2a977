"""What all objectives on pairs share: a row is a prompt with a chosen and a rejected answer, which stay together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from weft.objectives.objective import GroupRows, LikelihoodObjective, Part
from weft.objectives.preference.pair_rows import read_preference

if TYPE_CHECKING:
    from torch import Tensor


class Pairs(LikelihoodObjective):
    """A group is the chosen and the rejected answer of a row; the loss of a global batch is the mean of its pairs."""

    group_size: ClassVar[int] = 2
    part_format: ClassVar[str | None] = "auto"
    example: ClassVar[Mapping[str, Any]] = {"prompt": "a", "chosen": "b", "rejected": "c"}

    def parts(self, values: Mapping[str, Any], where: str) -> tuple[Part, ...]:
        """The prompt with the chosen and with the rejected answer."""
        row = read_preference(values, where)
        return tuple(Part({**row.context, "completion": answer}) for answer in (row.chosen, row.rejected))

    def divisor(self, sample_weights: Sequence[float]) -> float:
        """The pairs of the global batch."""
        return len(sample_weights) / self.group_size


def lengths(groups: GroupRows) -> Tensor:
    """The supervised tokens of each answer (G, 2)."""
    return groups.sums(groups.logprobs_N.new_ones(len(groups.logprobs_N)))


def opposed(values_G: Tensor) -> Tensor:
    """A value for the chosen answer of each pair and its negative for the rejected one (G, 2)."""
    return values_G[:, None] * values_G.new_tensor([1.0, -1.0])


def log_sigmoid(x: Tensor) -> Tensor:
    """log σ(x) without overflow."""
    return x.clamp(max=0) - (-x.abs()).exp().log1p()


def reward_metrics(rewards_G2: Tensor) -> dict[str, Tensor]:
    """What is measured of the rewards of both answers, by the names TRL has."""
    chosen_G, rejected_G = rewards_G2[:, 0], rewards_G2[:, 1]
    return {
        "rewards/chosen": chosen_G,
        "rewards/rejected": rejected_G,
        "rewards/accuracies": (chosen_G > rejected_G).float(),
        "rewards/margins": chosen_G - rejected_G,
    }
