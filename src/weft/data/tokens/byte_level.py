"""Tokenises without reading the characters of each token: computing them takes a tokenizer almost as long again.

Where tokens are consecutive bytes of the text, their lengths give their starts. That holds for the byte-level
tokenizers of most models today (GPT-2, Llama 3, Qwen, …): nothing is added, removed or replaced, so the bytes of a
text's tokens add up to those of the text. Where they do not, and for all other tokenizers, the characters are computed.
The first texts are tokenised both ways; a tokenizer for which the results differ is not used this way.
"""

from __future__ import annotations

import itertools
import json
import struct
import unicodedata
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from weft.data.conversation import Rendered

Ids: TypeAlias = npt.NDArray[np.int32]
Weights: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Encoded:
    """The tokens of a text as a whole."""

    tokens: Ids
    weights: Weights | None
    """Weight of each; None if a token reaches from outside into a trained span."""

    def is_same(self, other: Encoded) -> bool:
        one, two = self.weights, other.weights
        is_weighted_alike = one is two if one is None or two is None else np.array_equal(one, two)
        return is_weighted_alike and np.array_equal(self.tokens, other.tokens)


def packed(ids: list[int]) -> Ids:
    """A list of numbers as an array, several times as fast as numpy makes one."""
    return np.frombuffer(struct.pack(f"={len(ids)}i", *ids), np.int32)


def spread(spans: Iterable[tuple[int, int, float]], num_tokens: int) -> Weights:
    """Weights of tokens from spans [first, end) with a weight each; other tokens have weight 0."""
    weights = np.zeros(num_tokens)
    for first, end, weight in spans:
        weights[first:end] = weight
    return weights


Integers = npt.NDArray[np.int64]
NORMAL_FORM: Literal["NFC"] = "NFC"
"""The one normaliser that is accepted: it leaves most texts unchanged, which can be checked."""
_KNOWN: weakref.WeakKeyDictionary[Any, ByteLevel | None] = weakref.WeakKeyDictionary()


@dataclass
class ByteLevel:
    """A byte-level tokenizer and the bytes of each of its tokens."""

    backend: Any
    num_bytes: Integers
    """By token id."""
    is_proven: bool | None = None
    """True if it agrees with the tokenizer itself; None before the first comparison."""

    @classmethod
    def of(cls, tokenizer: Any) -> ByteLevel | None:
        """The byte-level view of a tokenizer; None for one whose tokens are not bytes of the text."""
        if tokenizer not in _KNOWN:
            backend = getattr(tokenizer, "backend_tokenizer", None)
            is_plain = backend is not None and hasattr(backend, "encode_batch_fast") and _keeps_bytes(backend)
            _KNOWN[tokenizer] = cls(backend, _token_bytes(backend)) if is_plain else None
        result = _KNOWN[tokenizer]
        return result if result is not None and result._is_set_as(tokenizer) else None

    def _is_set_as(self, tokenizer: Any) -> bool:
        """True if the library has the settings that transformers uses for a whole text without added tokens."""
        splits = getattr(tokenizer, "split_special_tokens", False)
        return (
            self.backend.truncation is None
            and self.backend.padding is None
            and self.backend.encode_special_tokens == splits
            and len(self.num_bytes) >= self.backend.get_vocab_size()
        )

    def encode(self, chunk: Sequence[Rendered]) -> list[Encoded | None]:
        """Tokens and weights of some texts; None for one whose characters have to be computed."""
        result = self.backend.encode_batch_fast([item.text for item in chunk], add_special_tokens=False)
        tokens = [packed(encoding.ids) for encoding in result]
        ends = list(itertools.accumulate(map(len, tokens), initial=0))
        together = np.concatenate(tokens)
        reached = np.cumsum(self.num_bytes[together])
        borders = _Borders(together, reached, np.concatenate([[0], reached]))
        return [borders.encoded(item, *tokens) for item, tokens in zip(chunk, itertools.pairwise(ends), strict=True)]


@dataclass(frozen=True)
class _Borders:
    """The concatenated tokens of many texts."""

    tokens: npt.NDArray[np.int32]
    reached: Integers
    """Byte after each token."""
    begun: Integers
    """Byte at which each token begins, and the end."""

    def encoded(self, item: Rendered, first: int, end: int) -> Encoded | None:
        """The text whose tokens are those from `first` to `end`."""
        text, origin = item.text, int(self.begun[first])
        is_ascii = text.isascii()
        num_bytes = len(text) if is_ascii else len(text.encode())
        if self.begun[end] - origin != num_bytes:
            return None
        if not is_ascii and not unicodedata.is_normalized(NORMAL_FORM, text):
            return None
        spans = []
        for (start, stop), weight in item.weighted_spans:
            if not is_ascii:
                start, stop = len(text[:start].encode()), len(text[:stop].encode())
            begin = first + int(self.begun[first:end].searchsorted(origin + start))
            if begin > first and self.reached[begin - 1] > origin + start:
                return Encoded(self.tokens[first:end], None)
            is_last = stop == num_bytes
            last = end if is_last else first + int(self.begun[first:end].searchsorted(origin + stop))
            spans.append((begin - first, last - first, weight))
        return Encoded(self.tokens[first:end], spread(spans, end - first))


def _keeps_bytes(backend: Any) -> bool:
    """True if the tokens of any text are its consecutive bytes."""
    model = backend.model
    if type(model).__name__ != "BPE" or model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return False
    normaliser = _state_of(backend.normalizer)
    splitting, finishing = _steps(backend.pre_tokenizer, "pretokenizers"), _steps(backend.post_processor, "processors")
    return (
        (normaliser is None or normaliser["type"] == NORMAL_FORM)
        and bool(splitting)
        and all(_keeps_text(step) for step in splitting[:-1])
        and splitting[-1]["type"] == "ByteLevel"
        and not splitting[-1]["add_prefix_space"]
        and all(_leaves_offsets(step) for step in finishing)
        and all(symbol in _vocabulary(backend) for symbol in _alphabet())
    )


def _keeps_text(step: dict[str, Any]) -> bool:
    return bool(step["type"] == "Digits" or (step["type"] == "Split" and step["behavior"] != "Removed"))


def _leaves_offsets(step: dict[str, Any]) -> bool:
    return bool(step["type"] == "TemplateProcessing" or (step["type"] == "ByteLevel" and not step["trim_offsets"]))


def _steps(part: Any, several: str) -> list[dict[str, Any]]:
    state = _state_of(part)
    if state is None:
        return []
    return list(state[several]) if state["type"] == "Sequence" else [state]


def _state_of(part: Any) -> dict[str, Any] | None:
    """The serialised state of a part of a tokenizer."""
    if part is None:
        return None
    result: dict[str, Any] = json.loads(part.__getstate__())
    return result


def _vocabulary(backend: Any) -> dict[str, int]:
    result: dict[str, int] = backend.get_vocab(with_added_tokens=False)
    return result


def _alphabet() -> Iterable[str]:
    from tokenizers.pre_tokenizers import ByteLevel as Library

    result: list[str] = Library.alphabet()
    return result


def _token_bytes(backend: Any) -> Integers:
    """The bytes of every token: the number of its symbols, or of the text of an added one."""
    vocabulary, added = _vocabulary(backend), backend.get_added_tokens_decoder()
    result = np.zeros(max([*vocabulary.values(), *added], default=-1) + 1, np.int64)
    for symbols, number in vocabulary.items():
        result[number] = len(symbols)
    for number, token in added.items():
        result[number] = len(token.content.encode())
    return result
