"""Reward modelling: a number for an answer, larger for the chosen one of a pair (Bradley and Terry's model).

With r the head's output at the last token of each answer and m the row's `margin`, 0 without one:

    -log σ(r_chosen - r_rejected - m)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from weft.errors import DataError
from weft.objectives.heads.head_objective import HeadLoss, HeadObjective
from weft.objectives.metrics import LOSS, MetricSum, Score
from weft.objectives.objective import Part
from weft.objectives.preference.pair_rows import read_preference
from weft.objectives.preference.pairs import Pairs, log_sigmoid, opposed
from weft.settings.fields import describe

if TYPE_CHECKING:
    from torch import Tensor


class Reward(HeadObjective):
    """A group is the chosen and the rejected answer of a row; the loss of a global batch is the mean of its pairs."""

    name: ClassVar[str] = "reward"
    group_size: ClassVar[int] = 2
    part_format: ClassVar[str | None] = "auto"
    example: ClassVar[Mapping[str, Any]] = Pairs.example
    task_type: ClassVar[str] = "SEQ_CLS"

    @property
    def num_labels(self) -> int:
        return 1

    def parts(self, values: Mapping[str, Any], where: str) -> tuple[Part, ...]:
        """The prompt with the chosen and with the rejected answer; the margin is the label of both."""
        row, margin = read_preference(values, where), values.get("margin")
        if margin is None:
            margin = 0.0
        if isinstance(margin, bool) or not isinstance(margin, int | float):
            raise DataError(f"margin is {describe(margin)}; expected a number.", where=where)
        answers = (row.chosen, row.rejected)
        return tuple(Part({**row.context, "completion": answer}, label=float(margin)) for answer in answers)

    def divisor(self, sample_weights: Sequence[float]) -> float:
        """The pairs of the global batch."""
        return len(sample_weights) / self.group_size

    def head_loss(self, logits_NL: Tensor, labels_N: Tensor) -> HeadLoss:
        """The loss of each pair, and the rewards of both answers."""
        rewards_U2 = logits_NL.view(-1, 2)
        h_U = rewards_U2[:, 0] - rewards_U2[:, 1] - labels_N.view(-1, 2)[:, 0]
        slopes_U2 = opposed(-(-h_U).sigmoid())
        return HeadLoss(-log_sigmoid(h_U), slopes_U2.reshape(-1, 1), rewards_U2)

    def score(self, label: float, loss: float, measured: Sequence[float]) -> Score:
        """Loss and rewards of one pair."""
        chosen, rejected = measured
        return {
            LOSS: MetricSum(loss, 1),
            "rewards/chosen": MetricSum(chosen, 1),
            "rewards/rejected": MetricSum(rejected, 1),
            "rewards/accuracies": MetricSum(chosen > rejected, 1),
            "rewards/margins": MetricSum(chosen - rejected, 1),
        }
