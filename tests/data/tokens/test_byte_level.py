"""Spans from the lengths of tokens are the same as the tokenizer's own offsets."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizer import make_tokenizer
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import weft.data.tokenise as tokenise_module
from weft.data.chats import Rendered
from weft.data.tokenise import ByteLevel, _encode_with_offsets, tokenise

MERGES = (("4", "2"), ("Ġ", "42"), ("Ċ", "Ċ"))


def split(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The tokenizer as newer models have theirs: words split by a pattern, a normal form, digits."""
    backend = tokenizer.backend_tokenizer
    backend.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(r" ?[^\s]+|\s+"), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.Digits(), level])
    return tokenizer


TOKENIZERS = (make_tokenizer(merges=MERGES), split(make_tokenizer(merges=MERGES, adds_bos=True)))


@given(
    st.lists(
        st.lists(st.text(alphabet="a 42\n\u00e9e\u0301\u212b\U0001f600<s>|", max_size=12), min_size=1, max_size=6),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from(TOKENIZERS),
)
def test_texts_when_encoded_by_lengths_then_tokens_and_weights_are_those_of_characters(
    texts: list[list[str]], tokenizer: Any
):
    """Merged tokens, split characters, special tokens and texts that a normal form changes included."""
    chunk = []
    for pieces in texts:
        ends = list(itertools.accumulate(map(len, pieces)))
        spans = tuple((end - len(piece), end) for piece, end in zip(pieces, ends, strict=True))[::2]
        chunk.append(Rendered("".join(pieces), spans, False, "x", tuple(1.0 + i for i in range(len(spans)))))
    quick = ByteLevel.of(tokenizer)
    assert quick is not None
    found, expected = quick.encode(chunk), _encode_with_offsets(chunk, tokenizer)
    assert all(one is None or one.is_same(other) for one, other in zip(found, expected, strict=True))
    assert all(one is not None for one, item in zip(found, chunk, strict=True) if item.text.isascii())


def test_vocabulary_when_it_is_large_then_is_copied_a_few_times_only(monkeypatch: pytest.MonkeyPatch):
    """A copy of 150,000 tokens takes a tenth of a second."""
    copies = []
    monkeypatch.setattr(tokenise_module, "_vocabulary", lambda backend: copies.append(1) or backend.get_vocab())
    assert ByteLevel.of(make_tokenizer(merges=MERGES)) is not None
    assert 1 <= len(copies) <= 2


def with_prefix(tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def with_lower_case(tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()


def with_greedy_token(tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.add_tokens([AddedToken("<mask>", lstrip=True)])


def with_removed_spaces(tokenizer: Any) -> None:
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), level])


def with_missing_bytes(tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.model = models.BPE(vocab={"a": 0}, merges=[])


def with_truncation(tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.enable_truncation(3)


@pytest.mark.parametrize(
    "change",
    [with_prefix, with_lower_case, with_greedy_token, with_removed_spaces, with_missing_bytes, with_truncation],
)
def test_tokenizer_when_its_tokens_are_not_the_bytes_of_a_text_then_its_own_offsets_are_used(change: Any):
    tokenizer = make_tokenizer(merges=MERGES)
    change(tokenizer)
    assert ByteLevel.of(tokenizer) is None


def test_tokenizer_when_it_trims_offsets_then_its_own_offsets_are_used():
    assert ByteLevel.of(make_tokenizer(trims_offsets=True)) is None


def test_tokenizer_when_the_first_texts_differ_then_lengths_are_never_used():
    """A tokenizer may do anything unknown; then its own offsets count, for these and all later texts."""
    tokenizer = make_tokenizer()
    quick = ByteLevel.of(tokenizer)
    assert quick is not None
    quick.num_bytes[tokenizer.convert_tokens_to_ids(["a", "b"])] = [2, 0]
    rendered = Rendered("ab", ((1, 2),), False, "x")
    for _ in range(2):
        (sample,) = tokenise([rendered], tokenizer)
        assert sample.supervised.tolist() == [False, True]
    assert quick.is_proven is False
