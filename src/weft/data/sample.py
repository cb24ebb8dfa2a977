"""One tokenised example: its token ids, which of them count in the loss, their weights and labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class TeacherTokens(NamedTuple):
    """A teacher's most likely tokens for each supervised token, [supervised, K], in descending order."""

    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]

    def first(self, number: int) -> TeacherTokens:
        """The first `number` of them."""
        return TeacherTokens(self.ids[:number], self.logprobs[:number])


@dataclass(frozen=True, eq=False)
class Sample:
    """Token ids and, for each, whether and how much it counts in the loss; the arrays are read-only."""

    tokens: npt.NDArray[np.int32]
    """The token ids, [L]."""
    supervised: npt.NDArray[np.bool_]
    """True if token i counts in the loss as a target, predicted from the tokens before it, [L]. Token 0 never does:
    nothing comes before it."""
    weights: npt.NDArray[np.float64] | None = None
    """Weight of token i in the loss, [L]; a token of weight 0 is not supervised. None, also where every weight is 1:
    all supervised tokens count the same."""
    labels: npt.NDArray[np.float32] | None = None
    """Label of token i, for objectives that read labels, [L]; NaN without one."""
    teacher: TeacherTokens | None = None
    """Teacher's outputs for the supervised tokens, if the data holds them."""

    def __post_init__(self) -> None:
        tokens = np.array(self.tokens, dtype=np.int32)
        supervised = np.array(self.supervised, dtype=np.bool_)
        assert tokens.ndim == 1, "a sample is one run of tokens"
        assert tokens.shape == supervised.shape, "tokens and supervised must have one length"
        # A head looks at the token itself, also at the first.
        if self.labels is None or np.isnan(self.labels[:1]).any():
            supervised[:1] = False
        weights = None if self.weights is None else np.array(self.weights, dtype=np.float64)
        if weights is not None:
            assert weights.shape == tokens.shape and (weights >= 0).all(), "every token has a weight from 0 up"
            supervised &= weights > 0
            weights = None if (weights[supervised] == 1).all() else weights
        labels = None if self.labels is None else np.array(self.labels, dtype=np.float32)
        assert labels is None or labels.shape == tokens.shape, "every token has a label or NaN"
        arrays = (("tokens", tokens), ("supervised", supervised), ("weights", weights), ("labels", labels))
        for name, array in arrays:
            if array is not None:
                array.setflags(write=False)
            object.__setattr__(self, name, array)

    @property
    def length(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def num_supervised(self) -> int:
        """Number of tokens that count in the loss."""
        return int(self.supervised.sum())

    @property
    def total_weight(self) -> float:
        """Sum of the weights of its supervised tokens: their number, where all count the same."""
        return self.num_supervised if self.weights is None else float(self.weights[self.supervised].sum())

    def cut(self, length: int, *, keeps_end: bool = False) -> Sample:
        """The first `length` tokens; with `keeps_end` the label of the last token is kept."""
        if keeps_end and self.labels is not None and length < self.length:
            return Sample(self.tokens[:length], self.supervised[:length]).labelled_end(float(self.labels[-1]))
        weights = None if self.weights is None else self.weights[:length]
        labels = None if self.labels is None else self.labels[:length]
        teacher = None if self.teacher is None else self.teacher.first(int(self.supervised[:length].sum()))
        return Sample(self.tokens[:length], self.supervised[:length], weights, labels, teacher)

    def with_teacher(self, ids: npt.ArrayLike, logprobs: npt.ArrayLike) -> Sample:
        """The same tokens with a teacher's outputs for each supervised one, [supervised, K]."""
        teacher = TeacherTokens(np.array(ids, dtype=np.int32), np.array(logprobs, dtype=np.float32))
        assert teacher.ids.shape == teacher.logprobs.shape and len(teacher.ids) == self.num_supervised
        return Sample(self.tokens, self.supervised, self.weights, self.labels, teacher)

    def labelled(self, label: float) -> Sample:
        """The same tokens, the first supervised one with a label; a sample that has nothing to learn stays as it is."""
        if not self.num_supervised:
            return self
        labels = np.full(self.length, np.nan, dtype=np.float32)
        labels[self.first_supervised] = label
        return Sample(self.tokens, self.supervised, self.weights, labels)

    def labelled_end(self, label: float) -> Sample:
        """The same tokens, of which only the last counts, with a label."""
        labels = np.full(self.length, np.nan, dtype=np.float32)
        labels[-1:] = label
        return Sample(self.tokens, ~np.isnan(labels), None, labels)

    @property
    def first_supervised(self) -> int:
        """Index of the first token that counts in the loss."""
        return int(self.supervised.argmax())

    @property
    def label(self) -> float:
        """Its first label; NaN without one."""
        known = np.empty(0) if self.labels is None else self.labels[~np.isnan(self.labels)]
        return float(known[0]) if len(known) else float("nan")

    def led_by(self, num_rows: int) -> Sample:
        """The sample with rows in front of it that hold no token; they have the id of any token."""
        if not num_rows:
            return self
        front = np.zeros(num_rows)
        weights = None if self.weights is None else np.concatenate([front, self.weights])
        labels = None if self.labels is None else np.concatenate([np.full(num_rows, np.nan), self.labels])
        return Sample(np.concatenate([front, self.tokens]), np.concatenate([front, self.supervised]), weights, labels)

    def weighted(self, weight: float) -> Sample:
        """The same tokens with their weights multiplied by `weight`."""
        if weight == 1:
            return self
        before = np.ones(self.length) if self.weights is None else self.weights
        return Sample(self.tokens, self.supervised, weight * before, self.labels, self.teacher)
