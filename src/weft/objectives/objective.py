"""What an objective is: how a row becomes samples, what their tokens count, and what is measured.

The layer lies below data, so that all that reads rows can ask it: an objective meets a row as plain columns, which it
hands on as one or more rows that data's formats read. It knows no form of a row and no sample. What it says of a loss
is in plain numbers, or in tensors whose methods it calls; torch is never imported here. Shape suffixes: N supervised
rows, G groups, M samples of a group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self

if TYPE_CHECKING:
    from torch import Tensor

    from weft.spec import JobSpec


class TeacherTopK(NamedTuple):
    """A teacher's most likely tokens for each supervised token of a sample, as many for each; the first first."""

    ids: Sequence[Sequence[int]]
    logprobs: Sequence[Sequence[float]]


@dataclass(frozen=True)
class Part:
    """One sample of a row, as the columns that data's formats read."""

    values: Mapping[str, Any]
    weight: float = 1.0
    """What its supervised tokens count, beside those of other samples; 0 leaves the sample out."""
    label: float | None = None
    """What it is labelled as, for objectives that read labels."""
    teacher: TeacherTopK | None = None
    """What a teacher has said of it, where a row holds that."""


class Objective(ABC):
    """What a job learns by. The weights of its tokens are known before the forward pass."""

    name: ClassVar[str]
    example: ClassVar[Mapping[str, Any]]
    """A row for it."""
    group_size: ClassVar[int] = 1
    """Samples of a row. They form a group, which always shares a microbatch; a global batch counts groups."""
    part_format: ClassVar[str | None] = None
    """The format of its parts, if it makes them of other columns; None: a part is the row itself, in its own format."""
    reads_reference: ClassVar[bool] = False
    """Whether it compares with a reference, or a teacher: the bare backbone, an adapter that the job names, or the data
    itself."""

    def of_job(self, job: JobSpec) -> Self:
        """The same with a job's settings."""
        return self

    def claims(self, values: Mapping[str, Any]) -> bool:
        """Whether a row's columns ask for this objective, where a job names none."""
        return False

    @abstractmethod
    def parts(self, values: Mapping[str, Any], where: str) -> tuple[Part, ...]:
        """The samples of a row; a column that is wrong is a DataError at `where`."""

    @abstractmethod
    def divisor(self, sample_weights: Sequence[float]) -> float:
        """What the loss of a global batch is divided by; per sample, what its supervised tokens weigh together."""


class SettingsOfObjective:
    """Root of the settings of objectives, which JobSpec inherits. Each class checks its settings, then calls super."""

    @classmethod
    def check_objective(cls, job: JobSpec) -> None:
        """ConfigError for settings of an objective that do not go with each other."""


class GroupRows(Protocol):
    """The supervised rows of whole groups on the device: group by group, sample by sample."""

    @property
    def logprobs_N(self) -> Tensor:
        """fp32, of the tokens as the job's adapter predicts them."""
        ...

    @property
    def references_N(self) -> Tensor | None:
        """The same of the job's reference, where the objective asks for them."""
        ...

    @property
    def labels_GM(self) -> Tensor | None:
        """What each sample is labelled as, where the objective reads labels."""
        ...

    def sums(self, values_N: Tensor) -> Tensor:
        """The sum over each sample's rows (G, M), in an order that no neighbour changes."""
        ...

    def spread(self, values_GM: Tensor) -> Tensor:
        """Every sample's value on each of its rows (N)."""
        ...


@dataclass(frozen=True)
class Judged:
    """What an objective makes of groups."""

    losses_G: Tensor
    weights_N: Tensor
    """-dloss / dlogprob of every row: what the row's cross entropy counts in the gradient of its group's loss."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Whatever else it measures (G), by name; NaN for a group that has no such value, which no mean counts."""


class LikelihoodObjective(Objective):
    """An objective whose weights depend on log-probabilities, so its rows go through the output head twice."""

    reads_mismatch: ClassVar[bool] = False
    """Whether a group's prompt also runs with the next group's answer, which learns nothing: M is then 2."""
    reads_labels: ClassVar[bool] = False
    """Whether it reads its samples' labels."""

    @abstractmethod
    def judge(self, groups: GroupRows) -> Judged:
        """Loss and row weights of all groups of a microbatch, on the device: nothing here may wait for it."""
