"""Objectives with a head of their own: classes of texts and of words, and rewards."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from weft.errors import ConfigError, DataError, counted, did_you_mean
from weft.objectives.objective import CLASS_F1, LOSS, MetricSum, Objective, Part, Score, SettingsOfObjective
from weft.objectives.pairs import Pairs, log_sigmoid, opposed, read_preference
from weft.settings import LARGEST, describe, is_usable_number, setting

if TYPE_CHECKING:
    from torch import Tensor

    from weft.spec import JobSpec


@dataclass(frozen=True)
class HeadLoss:
    losses_U: Tensor
    slopes_NL: Tensor
    measured_UK: Tensor
    """Values from which `score` computes metrics."""


class HeadObjective(Objective):
    """An objective with a trained head; a unit is one labelled row of each sample of a group."""

    task_type: ClassVar[str]
    has_bias: ClassVar[bool] = False
    labels_end: ClassVar[bool] = True
    """Whether the label of a sample belongs to its last token, wherever the sample is cut."""

    labels: tuple[str, ...] = ()
    """Names of the labels, in the order of their logits; empty for a reward."""

    @property
    def num_labels(self) -> int:
        return len(self.labels)

    @abstractmethod
    def head_loss(self, logits_NL: Tensor, labels_N: Tensor) -> HeadLoss:
        """Losses and slopes, on the device; must not wait for it."""

    @abstractmethod
    def score(self, label: float, loss: float, measured: Sequence[float]) -> Score: ...


TEXTS = ("text", "sentence", "prompt", "content")
LABELS = ("label", "labels")
WORDS = ("tokens", "words")
TAGS = ("ner_tags", "pos_tags", "chunk_tags", "tags", "labels")
IGNORED = -100
"""Tag of a word that is not trained."""


@dataclass(frozen=True)
class ClassSettings(SettingsOfObjective):
    labels: tuple[str, ...] = setting(
        (), aliases=("label_names",), objectives=("classification", "token_classification")
    )
    """Names of the classes, in the order of the head's logits. Default: those of the training data, in order of number
    or alphabet."""

    @classmethod
    def check_objective(cls, job: JobSpec) -> None:
        if job.labels and (len(job.labels) < 2 or len(set(job.labels)) < len(job.labels)):
            raise ConfigError(f"got {', '.join(job.labels)}; expected two or more different names.", where="labels")
        super().check_objective(job)


@dataclass(frozen=True)
class Classification(HeadObjective):
    labels: tuple[str, ...] = ()
    name: ClassVar[str] = "classification"
    example: ClassVar[Mapping[str, Any]] = {"text": "a", "label": "yes"}
    part_format: ClassVar[str | None] = "passage"
    task_type: ClassVar[str] = "SEQ_CLS"

    def of_job(self, job: JobSpec) -> Self:
        return type(self)(job.labels or self.labels)

    def given_labels(self, values: Mapping[str, Any], where: str) -> Iterable[Any]:
        return [values[_column(values, LABELS, "label", where)]]

    def parts(self, values: Mapping[str, Any], where: str) -> tuple[Part, ...]:
        text = values[_column(values, TEXTS, "text", where)]
        if not isinstance(text, str):
            raise DataError(f"the text is {describe(text)}; expected text.", where=where)
        (given,) = self.given_labels(values, where)
        return (Part({"text": text, "label": self._class(given, "label", where)}),)

    def divisor(self, sample_weights: Sequence[float]) -> float:
        return sum(sample_weights)

    def head_loss(self, logits_NL: Tensor, labels_N: Tensor) -> HeadLoss:
        logprobs_NL, classes_N1 = logits_NL.log_softmax(dim=-1), labels_N.long()[:, None]
        losses_N = -logprobs_NL.gather(1, classes_N1)[:, 0]
        hits_NL = logits_NL.new_zeros(logits_NL.shape).scatter(1, classes_N1, 1.0)
        predicted_N1 = logits_NL.argmax(dim=-1, keepdim=True).to(logits_NL.dtype)
        return HeadLoss(losses_N, logprobs_NL.exp() - hits_NL, predicted_N1)

    def score(self, label: float, loss: float, measured: Sequence[float]) -> Score:
        """Loss, accuracy, and the terms of F1."""
        right, predicted = int(label), int(measured[0])
        found = {LOSS: MetricSum(loss, 1), "accuracy": MetricSum(right == predicted, 1)}
        if right == predicted:
            return {**found, f"{CLASS_F1}{right}": MetricSum(2, 2)}
        return {**found, f"{CLASS_F1}{right}": MetricSum(0, 1), f"{CLASS_F1}{predicted}": MetricSum(0, 1)}

    def _class(self, given: Any, what: str, where: str) -> int:
        name = label_name(given, what, where)
        if name in self.labels:
            return self.labels.index(name)
        raise DataError(
            f"{what} is {describe(given)}; accepted are {', '.join(self.labels)}.",
            where=where,
            hint=did_you_mean(name, self.labels),
        )


class TokenClassification(Classification):
    """Every row is a list of words with a class each; the loss of a global batch is the mean over words."""

    name: ClassVar[str] = "token_classification"
    example: ClassVar[Mapping[str, Any]] = {"tokens": ["a", "b"], "ner_tags": ["no", -100]}
    part_format: ClassVar[str | None] = "words"
    task_type: ClassVar[str] = "TOKEN_CLS"
    has_bias: ClassVar[bool] = True
    labels_end: ClassVar[bool] = False

    def given_labels(self, values: Mapping[str, Any], where: str) -> Iterable[Any]:
        return [tag for tag in self._tags(values, where)[1] if tag != IGNORED]

    def parts(self, values: Mapping[str, Any], where: str) -> tuple[Part, ...]:
        column = _column(values, WORDS, "tokens", where)
        words, (name, tags) = values[column], self._tags(values, where)
        if not isinstance(words, list) or not all(isinstance(word, str) and word for word in words):
            raise DataError(f"{column} is {describe(words)}; expected a list of words.", where=where)
        if len(words) != len(tags):
            raise DataError(f"{name} has {counted(len(tags), 'item')}, but {column} has {len(words)}.", where=where)
        classes = [None if tag == IGNORED else self._class(tag, f"{name}[{i}]", where) for i, tag in enumerate(tags)]
        return (Part({"tokens": words, "tags": classes}),)

    def _tags(self, values: Mapping[str, Any], where: str) -> tuple[str, list[Any]]:
        column = _column(values, TAGS, "ner_tags", where)
        tags = values[column]
        if not isinstance(tags, list):
            raise DataError(f"{column} is {describe(tags)}; expected a list with one item for each word.", where=where)
        return column, tags


def label_name(given: Any, what: str, where: str) -> str:
    if isinstance(given, bool):
        return "true" if given else "false"
    if isinstance(given, float) and given.is_integer():
        given = int(given)
    if isinstance(given, int) and given >= 0:
        return str(given)
    if isinstance(given, str) and given.strip():
        return given.strip()
    raise DataError(f"{what} is {describe(given)}; expected a text or a number from 0 up.", where=where)


def _column(values: Mapping[str, Any], names: Sequence[str], what: str, where: str) -> str:
    for name in names:
        if values.get(name) not in (None, ""):
            return name
    raise DataError(f"{what} is missing.", where=where, hint=f"Known columns are {', '.join(names)}; or data_columns.")


class Reward(HeadObjective):
    """A row's chosen and rejected answer form a group; the loss of a global batch is the mean over pairs."""

    name: ClassVar[str] = "reward"
    group_size: ClassVar[int] = 2
    part_format: ClassVar[str | None] = "auto"
    example: ClassVar[Mapping[str, Any]] = Pairs.example
    task_type: ClassVar[str] = "SEQ_CLS"

    @property
    def num_labels(self) -> int:
        return 1

    def parts(self, values: Mapping[str, Any], where: str) -> tuple[Part, ...]:
        """The prompt with each answer; the margin is the label of both."""
        row, margin = read_preference(values, where), values.get("margin")
        if margin is None:
            margin = 0.0
        if not is_usable_number(margin):
            problem = f"margin is {describe(margin)}; expected a number of at most {LARGEST:.0e}."
            raise DataError(problem, where=where)
        answers = (row.chosen, row.rejected)
        return tuple(Part({**row.context, "completion": answer}, label=float(margin)) for answer in answers)

    def divisor(self, sample_weights: Sequence[float]) -> float:
        return len(sample_weights) / self.group_size

    def head_loss(self, logits_NL: Tensor, labels_N: Tensor) -> HeadLoss:
        rewards_U2 = logits_NL.view(-1, 2)
        h_U = rewards_U2[:, 0] - rewards_U2[:, 1] - labels_N.view(-1, 2)[:, 0]
        slopes_U2 = opposed(-(-h_U).sigmoid())
        return HeadLoss(-log_sigmoid(h_U), slopes_U2.reshape(-1, 1), rewards_U2)

    def score(self, label: float, loss: float, measured: Sequence[float]) -> Score:
        chosen, rejected = measured
        return {
            LOSS: MetricSum(loss, 1),
            "rewards/chosen": MetricSum(chosen, 1),
            "rewards/rejected": MetricSum(rejected, 1),
            "rewards/accuracies": MetricSum(chosen > rejected, 1),
            "rewards/margins": MetricSum(chosen - rejected, 1),
        }
