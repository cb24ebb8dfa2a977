"""The interface of objectives: how a row becomes samples, the weights of their tokens, and metrics.

The layer is below data, so that readers of rows can use it: an objective gets a row as plain columns and returns one or
more rows that data's formats read. Losses are plain numbers, or tensors whose methods it calls; torch is never imported
here. Shape suffixes: N supervised
rows, G groups, M samples of a group.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

    from weft.spec import JobSpec


class TeacherTopK(NamedTuple):
    """A teacher's most likely tokens for each supervised token of a sample, most likely first."""

    ids: Sequence[Sequence[int]]
    logprobs: Sequence[Sequence[float]]


@dataclass(frozen=True)
class Part:
    values: Mapping[str, Any]
    weight: float = 1.0
    """Weight of its supervised tokens; 0 leaves the sample out."""
    label: float | None = None
    teacher: TeacherTopK | None = None


class Objective(ABC):
    """A training objective. The weights of its tokens are known before the forward pass."""

    name: ClassVar[str]
    example: ClassVar[Mapping[str, Any]]
    group_size: ClassVar[int] = 1
    """Samples of a row. They form a group, which always shares a microbatch; a global batch counts groups."""
    part_format: ClassVar[str | None] = None
    """Format of its parts if they have other columns than the row; None: a part is the row itself."""
    reads_reference: ClassVar[bool] = False
    """Whether it compares with a reference or a teacher: the bare backbone, an adapter, or the data."""

    def of_job(self, job: JobSpec) -> Self:
        return self

    def claims(self, values: Mapping[str, Any]) -> bool:
        """Whether a row's columns select this objective, for a job that names none."""
        return False

    @abstractmethod
    def parts(self, values: Mapping[str, Any], where: str) -> tuple[Part, ...]:
        """The samples of a row; DataError at `where` for a wrong column."""

    @abstractmethod
    def divisor(self, sample_weights: Sequence[float]) -> float:
        """Divisor of a global batch's loss, given the summed token weights of each sample."""


class SettingsOfObjective:
    """Root of the settings of objectives, which JobSpec inherits. Each class checks its settings, then calls super."""

    @classmethod
    def check_objective(cls, job: JobSpec) -> None: ...


class GroupRows(Protocol):
    """The supervised rows of whole groups on the device: group by group, sample by sample."""

    @property
    def logprobs_N(self) -> Tensor:
        """Log-probabilities of the supervised tokens under the job's adapter, fp32."""

    @property
    def references_N(self) -> Tensor | None: ...

    @property
    def labels_GM(self) -> Tensor | None: ...

    def sums(self, values_N: Tensor) -> Tensor:
        """The sum over each sample's rows (G, M), in an order that no neighbour changes."""

    def spread(self, values_GM: Tensor) -> Tensor:
        """Every sample's value on each of its rows (N)."""


@dataclass(frozen=True)
class LikelihoodLoss:
    losses_G: Tensor
    weights_N: Tensor
    """-dloss / dlogprob of every row: the weight of the row's cross entropy in the gradient of its group's loss."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Further metrics (G) by name; NaN for a group without a value, which no mean counts."""


class LikelihoodObjective(Objective):
    """An objective whose weights depend on log-probabilities, so its rows go through the output head twice."""

    reads_mismatch: ClassVar[bool] = False
    """Whether a group's prompt also runs with the next group's answer, which gets no gradient: M is then 2."""
    reads_labels: ClassVar[bool] = False

    @abstractmethod
    def likelihood_loss(self, groups: GroupRows) -> LikelihoodLoss:
        """Loss and row weights of all groups of a microbatch, on the device; must not wait for it."""


LOSS = "loss"
ACCURACY = "mean_token_accuracy"
HEADLINES = ("rewards/accuracies", "rewards/margins", "accuracy", "f1", "teacher_agreement")
"""Metrics besides loss and token accuracy that short reports show, in this order."""


CLASS_F1 = "f1/"
"""Prefix of the F1 metrics of single classes; reports show their mean, f1."""


def is_share(name: str) -> bool:
    return name.endswith(("accuracy", "accuracies", "f1", "agreement"))


class MetricSum(NamedTuple):
    total: float
    divisor: float
    """Divisor of the summed totals in the mean: tokens, the sum of their weights, or groups."""


Score: TypeAlias = Mapping[str, MetricSum]


class MetricTotals:
    def __init__(self, sums: Score | None = None) -> None:
        self._sums: dict[str, MetricSum] = dict(sums or {})

    def add(self, score: Score) -> None:
        for name, (total, divisor) in score.items():
            before = self._sums.get(name, MetricSum(0.0, 0.0))
            self._sums[name] = MetricSum(before.total + total, before.divisor + divisor)

    @property
    def sums(self) -> Score:
        return dict(self._sums)

    @property
    def is_finite(self) -> bool:
        return LOSS not in self._sums or math.isfinite(self._sums[LOSS].total)

    def means(self) -> MeanScores:
        """The mean of every metric; NaN for loss and accuracy without samples."""
        found = {name: total / divisor if divisor else math.nan for name, (total, divisor) in self._sums.items()}
        classes = [found.pop(name) for name in list(found) if name.startswith(CLASS_F1)]
        if classes:
            found["f1"] = sum(classes) / len(classes)
        return MeanScores(found.pop(LOSS, math.nan), found.pop(ACCURACY, math.nan), found)


class MeanScores(NamedTuple):
    loss: float
    accuracy: float
    further: Mapping[str, float] = {}
