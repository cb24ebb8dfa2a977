"""One tokenised example: its token ids, which of them count in the loss, their weights and labels."""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt


class TeacherTokens(NamedTuple):
    """A teacher's most likely tokens for each supervised token, [supervised, K], in descending order."""

    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]

    def first(self, number: int) -> TeacherTokens:
        return TeacherTokens(self.ids[:number], self.logprobs[:number])


@dataclass(frozen=True, eq=False)
class Sample:
    """Token ids and, for each, whether and how much it counts in the loss; the arrays are read-only."""

    tokens: npt.NDArray[np.int32]
    supervised: npt.NDArray[np.bool_]
    """True if token i counts in the loss as a target, predicted from the tokens before it, [L]. Token 0 never does:
    nothing comes before it."""
    weights: npt.NDArray[np.float64] | None = None
    """Weight of token i in the loss, [L]; a token of weight 0 is not supervised. None, also where every weight is 1:
    all supervised tokens count the same."""
    labels: npt.NDArray[np.float32] | None = None
    """Label of token i, for objectives that read labels, [L]; NaN without one."""
    teacher: TeacherTokens | None = None

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
        return int(self.supervised.sum())

    @property
    def total_weight(self) -> float:
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
        return int(self.supervised.argmax())

    @property
    def label(self) -> float:
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
        if weight == 1:
            return self
        before = np.ones(self.length) if self.weights is None else self.weights
        return Sample(self.tokens, self.supervised, weight * before, self.labels, self.teacher)


HASHED_TOGETHER = 1024
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TokenArrays:
    tokens: npt.NDArray[np.int32]
    supervised: npt.NDArray[np.bool_]
    weights: npt.NDArray[np.float64] | None = None
    """Weight of each token in the loss; None if no sample has weights."""
    labels: npt.NDArray[np.float32] | None = None
    """Label of each token, NaN for none; None if no sample has labels."""
    teacher_ids: npt.NDArray[np.int32] | None = None
    """A teacher's most likely tokens for each supervised token, [S · K]; None if the data holds none."""
    teacher_logprobs: npt.NDArray[np.float32] | None = None
    cached_range: tuple[int, int] | None = None

    @functools.cached_property
    def token_range(self) -> tuple[int, int]:
        """The smallest and the largest token id, those of teachers included."""
        every = [self.tokens] if self.teacher_ids is None else [self.tokens, self.teacher_ids]
        return self.cached_range or (min(int(ids.min()) for ids in every), max(int(ids.max()) for ids in every))

    @functools.cached_property
    def num_teacher_tokens(self) -> int:
        """Tokens of a teacher for each supervised one: K; 0 where the data holds none."""
        return 0 if self.teacher_ids is None else len(self.teacher_ids) // max(1, int(self.supervised.sum()))

    def teacher(self, start: int, number: int) -> TeacherTokens | None:
        """Teacher's outputs for some supervised tokens, counted among all of them."""
        if self.teacher_ids is None or self.teacher_logprobs is None:
            return None
        flat = slice(start * self.num_teacher_tokens, (start + number) * self.num_teacher_tokens)
        shape = (-1, self.num_teacher_tokens)
        return TeacherTokens(self.teacher_ids[flat].reshape(shape), self.teacher_logprobs[flat].reshape(shape))


@dataclass(frozen=True, eq=False)
class Samples(Sequence[Sample]):
    """A view of some samples, in some order; another view of the same samples copies no token."""

    arrays: TokenArrays
    starts: Integers
    lengths: Integers
    num_supervised: Integers
    cached_fingerprint: str | None = None
    teacher_starts: Integers | None = None
    """Start of each sample among all supervised tokens, [N], if the arrays hold a teacher's outputs."""

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> Samples:
        given = list(samples)
        lengths = np.array([sample.length for sample in given], dtype=np.int64)
        weights = None
        if any(sample.weights is not None for sample in given):
            weights = np.concatenate([np.ones(s.length) if s.weights is None else s.weights for s in given])
        labels = None
        if any(sample.labels is not None for sample in given):
            labels = np.concatenate([np.full(s.length, np.nan) if s.labels is None else s.labels for s in given])
        arrays = TokenArrays(
            np.concatenate([np.empty(0, np.int32), *(sample.tokens for sample in given)]),
            np.concatenate([np.empty(0, np.bool_), *(sample.supervised for sample in given)]),
            weights,
            None if labels is None else labels.astype(np.float32),
            *_teachers(given),
        )
        supervised = np.array([sample.num_supervised for sample in given], dtype=np.int64)
        return cls.consecutive(arrays, lengths, supervised)

    @classmethod
    def consecutive(
        cls, arrays: TokenArrays, lengths: Integers, num_supervised: Integers, fingerprint: str | None = None
    ) -> Samples:
        teacher_starts = None if arrays.teacher_ids is None else np.cumsum(num_supervised) - num_supervised
        return cls(arrays, np.cumsum(lengths) - lengths, lengths, num_supervised, fingerprint, teacher_starts)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def first_labels(self) -> npt.NDArray[np.float32]:
        """The first label of each sample, [N]; every sample has one."""
        assert self.arrays.labels is not None
        labelled = np.flatnonzero(~np.isnan(self.arrays.labels))
        result: npt.NDArray[np.float32] = self.arrays.labels[labelled[np.searchsorted(labelled, self.starts)]]
        return result

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> Samples: ...

    def __getitem__(self, index: int | slice) -> Sample | Samples:
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        tokens_of = self._token_slice(index)
        weights = None if self.arrays.weights is None else self.arrays.weights[tokens_of]
        labels = None if self.arrays.labels is None else self.arrays.labels[tokens_of]
        return Sample(
            self.arrays.tokens[tokens_of], self.arrays.supervised[tokens_of], weights, labels, self._teacher(index)
        )

    def __iter__(self) -> Iterator[Sample]:
        return (self[i] for i in range(len(self)))

    def take(self, indices: Integers) -> Samples:
        """A view; one that is equal to a view in use is that view, so its fingerprint is computed once."""
        starts, lengths = self.starts[indices], self.lengths[indices]
        key = id(self.arrays), hashlib.sha256(starts.tobytes() + lengths.tobytes()).digest()
        view = _VIEWS.get(key)
        if view is None:
            teacher_starts = None if self.teacher_starts is None else self.teacher_starts[indices]
            view = Samples(self.arrays, starts, lengths, self.num_supervised[indices], teacher_starts=teacher_starts)
            _VIEWS[key] = view
        return view

    def total_weight(self, index: int) -> float:
        """Sum of the weights of the supervised tokens of one sample."""
        return int(self.num_supervised[index]) if self.arrays.weights is None else self[index].total_weight

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all lengths, tokens, masks and, for the samples that have any, weights, labels and teachers."""
        if self.cached_fingerprint is not None:
            return self.cached_fingerprint
        digest = hashlib.sha256()
        self.feed(digest)
        return digest.hexdigest()

    def feed(self, digest: hashlib._Hash) -> None:
        for first in range(0, len(self), HASHED_TOGETHER):
            pieces: list[bytes | memoryview] = []
            for i in range(first, min(first + HASHED_TOGETHER, len(self))):
                pieces += self._hashed(i)
            digest.update(b"".join(pieces))

    def _hashed(self, index: int) -> list[bytes | memoryview]:
        tokens_of = self._token_slice(index)
        pieces: list[bytes | memoryview] = [
            int(self.lengths[index]).to_bytes(8, "little"),
            self.arrays.tokens[tokens_of].astype("<i4", copy=False).data,
            self.arrays.supervised[tokens_of].data,
        ]
        if self.arrays.weights is None and self.arrays.labels is None and self.arrays.teacher_ids is None:
            return pieces
        sample = self[index]
        further = [None if sample.weights is None else sample.weights.astype("<f8")]
        further += [None if sample.labels is None else sample.labels.astype("<f4")]
        if sample.teacher is not None:
            further += [sample.teacher.ids.astype("<i4"), sample.teacher.logprobs.astype("<f4")]
        return [*pieces, *(array.tobytes() for array in further if array is not None)]

    def outside(self, vocabulary: int) -> Integers:
        """The samples that have a token outside 0 to `vocabulary` - 1."""
        smallest, largest = self.arrays.token_range
        if smallest >= 0 and largest < vocabulary:
            return np.empty(0, np.int64)
        result = (i for i in range(len(self)) if not self._is_inside(i, vocabulary))
        return np.fromiter(result, np.int64)

    def _is_inside(self, index: int, vocabulary: int) -> bool:
        tokens_of = self._token_slice(index)
        teacher = self._teacher(index)
        every = [self.arrays.tokens[tokens_of], *([] if teacher is None else [teacher.ids])]
        return all(bool(ids.min() >= 0 and ids.max() < vocabulary) for ids in every)

    def _teacher(self, index: int) -> TeacherTokens | None:
        if self.teacher_starts is None:
            return None
        return self.arrays.teacher(int(self.teacher_starts[index]), int(self.num_supervised[index]))

    def _token_slice(self, index: int) -> slice:
        start = int(self.starts[index])
        return slice(start, start + int(self.lengths[index]))


_VIEWS: weakref.WeakValueDictionary[tuple[int, bytes], Samples] = weakref.WeakValueDictionary()
"""Views in use, by their arrays, which live as long as a view of them, and by the SHA-256 of their rows."""


def _teachers(samples: Sequence[Sample]) -> tuple[npt.NDArray[np.int32] | None, npt.NDArray[np.float32] | None]:
    """Concatenated teachers' outputs of samples; all or none have them, of one width."""
    teachers = [sample.teacher for sample in samples if sample.teacher is not None]
    if not teachers:
        return None, None
    assert len(teachers) == len(samples), "a teacher speaks of every sample or of none"
    return np.concatenate([each.ids.ravel() for each in teachers]), np.concatenate(
        [each.logprobs.ravel() for each in teachers]
    )
