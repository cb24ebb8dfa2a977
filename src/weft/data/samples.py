"""Many samples in flat arrays, in memory or in mapped files; a `Sample` is made when it is read.

Only the starts and lengths of samples are separate numbers: planners and orders read those.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt

from weft.data.sample import Sample, TeacherTokens

HASHED_TOGETHER = 1024
"""Samples whose bytes are joined before they are hashed."""
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TokenArrays:
    """The concatenated tokens of all samples, [T]."""

    tokens: npt.NDArray[np.int32]
    supervised: npt.NDArray[np.bool_]
    weights: npt.NDArray[np.float64] | None = None
    """Weight of each token in the loss; None if no sample has weights."""
    labels: npt.NDArray[np.float32] | None = None
    """Label of each token, NaN for none; None if no sample has labels."""
    teacher_ids: npt.NDArray[np.int32] | None = None
    """A teacher's most likely tokens for each supervised token, [S · K]; None if the data holds none."""
    teacher_logprobs: npt.NDArray[np.float32] | None = None
    """Their log-probabilities, [S · K]."""
    cached_range: tuple[int, int] | None = None
    """Token range, if it has been computed."""

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
    """Start of each sample in the arrays, [N]."""
    lengths: Integers
    """Tokens of each sample, [N]."""
    num_supervised: Integers
    """Supervised tokens of each sample, [N]."""
    cached_fingerprint: str | None = None
    """Fingerprint of this very view, if it has been computed."""
    teacher_starts: Integers | None = None
    """Start of each sample among all supervised tokens, [N], if the arrays hold a teacher's outputs."""

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> Samples:
        """The samples one by one, copied into arrays."""
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
        """All samples of arrays, in order."""
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
        teacher_starts = None if self.teacher_starts is None else self.teacher_starts[indices]
        own = self.starts[indices], self.lengths[indices], self.num_supervised[indices]
        return Samples(self.arrays, *own, teacher_starts=teacher_starts)

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
        """Adds the samples to a fingerprint."""
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


def _teachers(samples: Sequence[Sample]) -> tuple[npt.NDArray[np.int32] | None, npt.NDArray[np.float32] | None]:
    """Concatenated teachers' outputs of samples; all or none have them, of one width."""
    teachers = [sample.teacher for sample in samples if sample.teacher is not None]
    if not teachers:
        return None, None
    assert len(teachers) == len(samples), "a teacher speaks of every sample or of none"
    return np.concatenate([each.ids.ravel() for each in teachers]), np.concatenate(
        [each.logprobs.ravel() for each in teachers]
    )
