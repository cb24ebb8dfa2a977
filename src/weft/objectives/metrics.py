"""What samples came to, by the names of metrics: sums that add up over samples, and what their means are taken over."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

LOSS = "loss"
ACCURACY = "mean_token_accuracy"
"""The share of supervised tokens that had the largest logit; ties count, rows that are not a number do not."""
HEADLINES = ("rewards/accuracies", "rewards/margins", "accuracy", "f1", "teacher_agreement")
"""Of what objectives measure beside loss and token accuracy, what a short account shows, in this order."""


CLASS_F1 = "f1/"
"""What the names of the F1 of single classes begin with: what is told is their mean, f1."""


def is_share(name: str) -> bool:
    """Whether a metric goes from 0 to 1, which its name tells."""
    return name.endswith(("accuracy", "accuracies", "f1", "agreement"))


class MetricSum(NamedTuple):
    """One metric of one sample."""

    total: float
    divisor: float
    """What the mean divides the totals by, added up as they are: tokens, the sum of their weights, or groups."""


Score: TypeAlias = Mapping[str, MetricSum]
"""What one sample came to."""


class MetricTotals:
    """Scores added up, sample by sample in the order they come."""

    def __init__(self) -> None:
        self._sums: dict[str, MetricSum] = {}

    def add(self, score: Score) -> None:
        """Counts one sample."""
        for name, (total, divisor) in score.items():
            before = self._sums.get(name, MetricSum(0.0, 0.0))
            self._sums[name] = MetricSum(before.total + total, before.divisor + divisor)

    @property
    def sums(self) -> Score:
        """What has been added up, as the score of one sample."""
        return dict(self._sums)

    @property
    def is_finite(self) -> bool:
        """Whether the loss is a finite number so far."""
        return LOSS not in self._sums or math.isfinite(self._sums[LOSS].total)

    def means(self) -> MeanScores:
        """The mean of every metric; NaN for loss and accuracy of nothing."""
        found = {name: total / divisor if divisor else math.nan for name, (total, divisor) in self._sums.items()}
        classes = [found.pop(name) for name in list(found) if name.startswith(CLASS_F1)]
        if classes:
            found["f1"] = sum(classes) / len(classes)
        return MeanScores(found.pop(LOSS, math.nan), found.pop(ACCURACY, math.nan), found)


class MeanScores(NamedTuple):
    """Mean metrics of some samples."""

    loss: float
    accuracy: float
    """Of the supervised tokens."""
    further: Mapping[str, float] = {}
    """What else the objective measures, by name."""
