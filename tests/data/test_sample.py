from __future__ import annotations

import numpy as np
import pytest

from weft.data.samples import Sample


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
