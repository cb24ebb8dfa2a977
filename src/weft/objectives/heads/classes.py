"""Classification: the class of a whole text from its last token, or the class of every word from its first token.

The loss is the cross entropy of the classes, as transformers' models for these tasks have it. F1 is the mean over the
classes that occur of 2 tp / (2 tp + fp + fn), for words counted word by word.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from weft.errors import ConfigError, DataError, closest
from weft.objectives.heads.head_objective import HeadLoss, HeadObjective
from weft.objectives.metrics import CLASS_F1, LOSS, MetricSum, Score
from weft.objectives.objective import Part, SettingsOfObjective
from weft.settings.fields import describe, setting

if TYPE_CHECKING:
    from torch import Tensor

    from weft.spec import JobSpec

TEXTS = ("text", "sentence", "prompt", "content")
"""Columns that hold a text to classify."""
LABELS = ("label", "labels")
WORDS = ("tokens", "words")
TAGS = ("ner_tags", "pos_tags", "chunk_tags", "tags", "labels")
IGNORED = -100
"""The tag of a word that is not trained."""


@dataclass(frozen=True)
class ClassSettings(SettingsOfObjective):
    """Settings of both."""

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
    """Every row is a text with a class; the loss of a global batch is the mean of its texts."""

    labels: tuple[str, ...] = ()
    name: ClassVar[str] = "classification"
    example: ClassVar[Mapping[str, Any]] = {"text": "a", "label": "yes"}
    part_format: ClassVar[str | None] = "passage"
    task_type: ClassVar[str] = "SEQ_CLS"

    def of_job(self, job: JobSpec) -> Self:
        """With the job's classes, where it names them; else with those that its data has."""
        return type(self)(job.labels or self.labels)

    def given_labels(self, values: Mapping[str, Any], where: str) -> Iterable[Any]:
        """The labels of a row as they stand there."""
        return [values[_column(values, LABELS, "label", where)]]

    def parts(self, values: Mapping[str, Any], where: str) -> tuple[Part, ...]:
        """The text and its class."""
        text = values[_column(values, TEXTS, "text", where)]
        if not isinstance(text, str):
            raise DataError(f"the text is {describe(text)}; expected text.", where=where)
        (given,) = self.given_labels(values, where)
        return (Part({"text": text, "label": self._class(given, "label", where)}),)

    def divisor(self, sample_weights: Sequence[float]) -> float:
        """What has a class in the global batch."""
        return sum(sample_weights)

    def head_loss(self, logits_NL: Tensor, labels_N: Tensor) -> HeadLoss:
        """The cross entropy of each row, and the class it would have said."""
        logprobs_NL, classes_N1 = logits_NL.log_softmax(dim=-1), labels_N.long()[:, None]
        losses_N = -logprobs_NL.gather(1, classes_N1)[:, 0]
        hits_NL = logits_NL.new_zeros(logits_NL.shape).scatter(1, classes_N1, 1.0)
        said_N1 = logits_NL.argmax(dim=-1, keepdim=True).to(logits_NL.dtype)
        return HeadLoss(losses_N, logprobs_NL.exp() - hits_NL, said_N1)

    def score(self, label: float, loss: float, measured: Sequence[float]) -> Score:
        """Loss, accuracy, and what F1 is made of."""
        right, said = int(label), int(measured[0])
        found = {LOSS: MetricSum(loss, 1), "accuracy": MetricSum(right == said, 1)}
        if right == said:
            return {**found, f"{CLASS_F1}{right}": MetricSum(2, 2)}
        return {**found, f"{CLASS_F1}{right}": MetricSum(0, 1), f"{CLASS_F1}{said}": MetricSum(0, 1)}

    def _class(self, given: Any, what: str, where: str) -> int:
        """The number of a class that a row names."""
        name = label_name(given, what, where)
        if name in self.labels:
            return self.labels.index(name)
        guess = closest(name, list(self.labels))
        raise DataError(
            f"{what} is {describe(given)}; accepted are {', '.join(self.labels)}.",
            where=where,
            hint=f"Did you mean {guess}?" if guess else None,
        )


class TokenClassification(Classification):
    """Every row is a list of words with a class each; the loss of a global batch is the mean of its words."""

    name: ClassVar[str] = "token_classification"
    example: ClassVar[Mapping[str, Any]] = {"tokens": ["a", "b"], "ner_tags": ["no", -100]}
    part_format: ClassVar[str | None] = "words"
    task_type: ClassVar[str] = "TOKEN_CLS"
    has_bias: ClassVar[bool] = True
    labels_end: ClassVar[bool] = False

    def given_labels(self, values: Mapping[str, Any], where: str) -> Iterable[Any]:
        """The tags of a row as they stand there, but for those that are not trained."""
        return [tag for tag in self._tags(values, where)[1] if tag != IGNORED]

    def parts(self, values: Mapping[str, Any], where: str) -> tuple[Part, ...]:
        """The words and their classes."""
        column = _column(values, WORDS, "tokens", where)
        words, (name, tags) = values[column], self._tags(values, where)
        if not isinstance(words, list) or not all(isinstance(word, str) and word for word in words):
            raise DataError(f"{column} is {describe(words)}; expected a list of words.", where=where)
        if len(words) != len(tags):
            raise DataError(f"{name} has {len(tags)} items, but {column} has {len(words)}.", where=where)
        classes = [None if tag == IGNORED else self._class(tag, f"{name}[{i}]", where) for i, tag in enumerate(tags)]
        return (Part({"tokens": words, "tags": classes}),)

    def _tags(self, values: Mapping[str, Any], where: str) -> tuple[str, list[Any]]:
        column = _column(values, TAGS, "ner_tags", where)
        tags = values[column]
        if not isinstance(tags, list):
            raise DataError(f"{column} is {describe(tags)}; expected a list with one item for each word.", where=where)
        return column, tags


def label_name(given: Any, what: str, where: str) -> str:
    """A label as its name: numbers are written out."""
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
    """The first column of those names that a row has."""
    for name in names:
        if values.get(name) not in (None, ""):
            return name
    raise DataError(f"{what} is missing.", where=where, hint=f"Known columns are {', '.join(names)}; or data_columns.")
