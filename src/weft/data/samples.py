"""Many samples in flat arrays, which may lie in memory or in mapped files; a `Sample` is made when one is asked for.

However many samples there are, only their places and lengths are numbers of their own: planners and orders read those.
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
    """The tokens of all samples behind one another, [T]."""

    tokens: npt.NDArray[np.int32]
    supervised: npt.NDArray[np.bool_]
    weights: npt.NDArray[np.float64] | None = None
    """What each token counts in the loss; None where no sample has weights."""
    labels: npt.NDArray[np.float32] | None = None
    """What each token is labelled as, NaN for nothing; None where no sample has labels."""
    teacher_ids: npt.NDArray[np.int32] | None = None
    """A teacher's most likely tokens in the place of each supervised token, [S · K]; None where the data holds none."""
    teacher_logprobs: npt.NDArray[np.float32] | None = None
    """Their log-probabilities, [S · K]."""
    known_range: tuple[int, int] | None = None
    """The token range, where somebody has looked already."""

    @functools.cached_property
    def token_range(self) -> tuple[int, int]:
        """The smallest and the largest token id, those of teachers included."""
        every = [self.tokens] if self.teacher_ids is None else [self.tokens, self.teacher_ids]
        return self.known_range or (min(int(ids.min()) for ids in every), max(int(ids.max()) for ids in every))

    @functools.cached_property
    def num_taught(self) -> int:
        """Tokens that a teacher names for each supervised one: K; 0 where the data holds none."""
        return 0 if self.teacher_ids is None else len(self.teacher_ids) // max(1, int(self.supervised.sum()))

    def teacher(self, start: int, number: int) -> TeacherTokens | None:
        """What a teacher has said of some supervised tokens, counted among all of them."""
        if self.teacher_ids is None or self.teacher_logprobs is None:
            return None
        flat = slice(start * self.num_taught, (start + number) * self.num_taught)
        shape = (-1, self.num_taught)
        return TeacherTokens(self.teacher_ids[flat].reshape(shape), self.teacher_logprobs[flat].reshape(shape))


@dataclass(frozen=True, eq=False)
class Samples(Sequence[Sample]):
    """A view of some samples, in some order; another view of the same samples copies no token."""

    arrays: TokenArrays
    starts: Integers
    """Where each sample begins in the arrays, [N]."""
    lengths: Integers
    """Tokens of each sample, [N]."""
    num_supervised: Integers
    """Supervised tokens of each sample, [N]."""
    known_fingerprint: str | None = None
    """The fingerprint of this very view, where somebody has computed it already."""
    told_starts: Integers | None = None
    """Where each sample begins among all supervised tokens, [N], if the arrays hold what a teacher said of these."""

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
        return cls.behind_one_another(arrays, lengths, supervised)

    @classmethod
    def behind_one_another(
        cls, arrays: TokenArrays, lengths: Integers, num_supervised: Integers, fingerprint: str | None = None
    ) -> Samples:
        """All samples of arrays, in order."""
        told_starts = None if arrays.teacher_ids is None else np.cumsum(num_supervised) - num_supervised
        return cls(arrays, np.cumsum(lengths) - lengths, lengths, num_supervised, fingerprint, told_starts)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def first_labels(self) -> npt.NDArray[np.float32]:
        """The first label of each sample, [N]; every sample has one."""
        assert self.arrays.labels is not None
        labelled = np.flatnonzero(~np.isnan(self.arrays.labels))
        found: npt.NDArray[np.float32] = self.arrays.labels[labelled[np.searchsorted(labelled, self.starts)]]
        return found

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> Samples: ...

    def __getitem__(self, index: int | slice) -> Sample | Samples:
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        place = self._place(index)
        weights = None if self.arrays.weights is None else self.arrays.weights[place]
        labels = None if self.arrays.labels is None else self.arrays.labels[place]
        return Sample(self.arrays.tokens[place], self.arrays.supervised[place], weights, labels, self._teacher(index))

    def __iter__(self) -> Iterator[Sample]:
        return (self[i] for i in range(len(self)))

    def take(self, indices: Integers) -> Samples:
        """Some of the samples, in that order."""
        told_starts = None if self.told_starts is None else self.told_starts[indices]
        own = self.starts[indices], self.lengths[indices], self.num_supervised[indices]
        return Samples(self.arrays, *own, told_starts=told_starts)

    def total_weight(self, index: int) -> float:
        """What the supervised tokens of one sample count together."""
        return int(self.num_supervised[index]) if self.arrays.weights is None else self[index].total_weight

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all lengths, tokens, masks and, for the samples that have any, weights, labels and teachers."""
        if self.known_fingerprint is not None:
            return self.known_fingerprint
        digest = hashlib.sha256()
        self.feed(digest)
        return digest.hexdigest()

    def feed(self, digest: hashlib._Hash) -> None:
        """Goes on with a fingerprint, behind other samples."""
        for first in range(0, len(self), HASHED_TOGETHER):
            pieces: list[bytes | memoryview] = []
            for i in range(first, min(first + HASHED_TOGETHER, len(self))):
                pieces += self._hashed(i)
            digest.update(b"".join(pieces))

    def _hashed(self, index: int) -> list[bytes | memoryview]:
        place = self._place(index)
        pieces: list[bytes | memoryview] = [
            int(self.lengths[index]).to_bytes(8, "little"),
            self.arrays.tokens[place].astype("<i4", copy=False).data,
            self.arrays.supervised[place].data,
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
        found = (i for i in range(len(self)) if not self._is_inside(i, vocabulary))
        return np.fromiter(found, np.int64)

    def _is_inside(self, index: int, vocabulary: int) -> bool:
        place = self._place(index)
        teacher = self._teacher(index)
        every = [self.arrays.tokens[place], *([] if teacher is None else [teacher.ids])]
        return all(bool(ids.min() >= 0 and ids.max() < vocabulary) for ids in every)

    def _teacher(self, index: int) -> TeacherTokens | None:
        if self.told_starts is None:
            return None
        return self.arrays.teacher(int(self.told_starts[index]), int(self.num_supervised[index]))

    def _place(self, index: int) -> slice:
        start = int(self.starts[index])
        return slice(start, start + int(self.lengths[index]))


def _teachers(samples: Sequence[Sample]) -> tuple[npt.NDArray[np.int32] | None, npt.NDArray[np.float32] | None]:
    """What teachers have said of samples, behind one another; all or none have one, of one width."""
    told = [sample.teacher for sample in samples if sample.teacher is not None]
    if not told:
        return None, None
    assert len(told) == len(samples), "a teacher speaks of every sample or of none"
    return np.concatenate([each.ids.ravel() for each in told]), np.concatenate([each.logprobs.ravel() for each in told])
