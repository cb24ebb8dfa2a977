"""What an objective with a head is: what it learns from logits of labels instead of from tokens.

A job with such an objective trains a small linear head beside its adapter. Shape suffixes: N rows with a label, L
labels, U units that a loss is counted in (a row, or the rows of a group), K numbers that are measured of a unit.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from weft.objectives.metrics import Score
from weft.objectives.objective import Objective

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class HeadLoss:
    """What an objective makes of logits."""

    losses_U: Tensor
    slopes_NL: Tensor
    """dloss / dlogit."""
    measured_UK: Tensor
    """What `score` makes metrics of."""


class HeadObjective(Objective):
    """An objective that learns by a head; a unit is one labelled row of each sample of a group."""

    task_type: ClassVar[str]
    """What PEFT calls it."""
    has_bias: ClassVar[bool] = False
    """Whether transformers' head for this task has a bias."""
    labels_end: ClassVar[bool] = True
    """Whether the label of a sample stands at its last token, wherever the sample is cut."""

    labels: tuple[str, ...] = ()
    """The names of the labels, in the order of their logits; none for a reward."""

    @property
    def num_labels(self) -> int:
        """L."""
        return len(self.labels)

    @abstractmethod
    def head_loss(self, logits_NL: Tensor, labels_N: Tensor) -> HeadLoss:
        """Losses and slopes, on the device: nothing here may wait for it."""

    @abstractmethod
    def score(self, label: float, loss: float, measured: Sequence[float]) -> Score:
        """The metrics of one unit."""
