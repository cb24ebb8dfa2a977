"""Samples in flat arrays are the samples they were made of."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence

import numpy as np
import pytest

from weft.data.samples import HASHED_TOGETHER, Sample, Samples


def made(number: int, *, weighted: bool) -> list[Sample]:
    rng = np.random.default_rng(number)
    found = []
    for i in range(number):
        length = int(rng.integers(1, 9))
        weights = rng.choice([0.0, 0.5, 1.0], length) if weighted and i % 3 else None
        found.append(Sample(rng.integers(0, 99, length), rng.random(length) < 0.7, weights))
    return found


def plain_fingerprint(samples: Sequence[Sample]) -> str:
    """As checkpoints have recorded it since the first of them."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(sample.length.to_bytes(8, "little"))
        digest.update(sample.tokens.astype("<i4").tobytes())
        digest.update(sample.supervised.tobytes())
        if sample.weights is not None:
            digest.update(sample.weights.astype("<f8").tobytes())
    return digest.hexdigest()


def alike(one: Sample, other: Sample) -> bool:
    weights = [None if s.weights is None else s.weights.tolist() for s in (one, other)]
    return (
        one.tokens.tolist() == other.tokens.tolist()
        and one.supervised.tolist() == other.supervised.tolist()
        and weights[0] == weights[1]
    )


@pytest.mark.parametrize("weighted", [False, True])
def test_samples_when_put_into_arrays_then_come_out_the_same(weighted: bool):
    """Tokens, masks and weights of every sample survive, and so does a view of some of them."""
    given = made(20, weighted=weighted)
    samples = Samples.of(given)
    assert all(alike(*pair) for pair in zip(given, samples, strict=True))
    assert [samples.total_weight(i) for i in range(20)] == [sample.total_weight for sample in given]
    assert samples.num_supervised.tolist() == [sample.num_supervised for sample in given]
    some = samples.take(np.array([7, 2, 11]))
    assert all(alike(*pair) for pair in zip([given[7], given[2], given[11]], some, strict=True))
    assert all(alike(*pair) for pair in zip(given[3:9], samples[3:9], strict=True))
    assert all(alike(*pair) for pair in zip(given, pickle.loads(pickle.dumps(samples)), strict=True))


@pytest.mark.parametrize("weighted", [False, True])
def test_fingerprint_when_samples_lie_in_arrays_then_is_what_it_was(weighted: bool):
    """A run that was begun with samples one by one resumes with samples in arrays."""
    given = made(HASHED_TOGETHER + 5, weighted=weighted)
    assert Samples.of(given).fingerprint == plain_fingerprint(given)
    assert Samples.of(given).take(np.array([5, 3])).fingerprint == plain_fingerprint([given[5], given[3]])


def test_outside_when_a_token_is_unknown_then_finds_its_sample():
    """Only the samples of the view count."""
    samples = Samples.of([Sample(np.array(t), np.ones(2)) for t in ([1, 2], [3, 9], [4, 5], [-1, 0])])
    assert samples.outside(9).tolist() == [1, 3]
    assert samples.outside(10).tolist() == [3]
    assert samples.take(np.array([0, 2])).outside(9).tolist() == []


def sample(tokens: list[int], supervised: list[bool]) -> Sample:
    return Sample(np.array(tokens), np.array(supervised))


def test_sample_first_token_when_marked_supervised_then_is_not():
    made = sample([5, 6, 7], [True, True, False])
    assert made.supervised.tolist() == [False, True, False]
    assert (made.length, made.num_supervised) == (3, 1)


def test_sample_arrays_when_made_then_are_typed_copies_that_cannot_be_written():
    tokens = np.array([1, 2, 3])
    made = Sample(tokens, np.array([0, 1, 1]))
    tokens[0] = 9
    assert made.tokens.dtype == np.int32
    assert made.supervised.dtype == np.bool_
    assert made.tokens.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        made.tokens[0] = 9


def test_sample_when_cut_then_keeps_the_front():
    made = sample([1, 2, 3, 4], [False, False, True, True]).cut(3)
    assert made.tokens.tolist() == [1, 2, 3]
    assert made.num_supervised == 1


def test_sample_when_empty_then_has_no_length():
    made = sample([], [])
    assert (made.length, made.num_supervised) == (0, 0)


def test_sample_when_lengths_differ_then_is_our_bug():
    with pytest.raises(AssertionError):
        sample([1, 2], [True])
