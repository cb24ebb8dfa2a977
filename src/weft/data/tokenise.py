"""Tokenises without reading the characters of each token: computing them takes a tokenizer almost as long again.

Where tokens are consecutive bytes of the text, their lengths give their starts. That holds for the byte-level
tokenizers of most models today (GPT-2, Llama 3, Qwen, …): nothing is added, removed or replaced, so the bytes of a
text's tokens add up to those of the text. Where they do not, and for all other tokenizers, the characters are computed.
The first texts are tokenised both ways; a tokenizer for which the results differ is not used this way.
"""

from __future__ import annotations

import bisect
import copy
import itertools
import json
import struct
import unicodedata
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from weft.data.chat_template import Tokenizer
from weft.data.chats import Passage, Rendered, Tokens, Words
from weft.data.samples import Sample
from weft.errors import ConfigError, DataError

Ids: TypeAlias = npt.NDArray[np.int32]
Weights: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Encoded:
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
    tokens: npt.NDArray[np.int32]
    reached: Integers
    """Byte after each token."""
    begun: Integers
    """Byte at which each token begins, and the end."""

    def encoded(self, item: Rendered, first: int, end: int) -> Encoded | None:
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
    from tokenizers.pre_tokenizers import ByteLevel as Library

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
        and _vocabulary(backend).keys() >= set(Library.alphabet())
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
    if part is None:
        return None
    result: dict[str, Any] = json.loads(part.__getstate__())
    return result


def _vocabulary(backend: Any) -> dict[str, int]:
    result: dict[str, int] = backend.get_vocab(with_added_tokens=False)
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


TEXTS_PER_CALL = 1024
"""A fast tokenizer spreads the texts of one call over all cores; more at a time only takes memory."""


def tokenise(rendered: Sequence[Rendered], tokenizer: Tokenizer) -> Iterator[Sample]:
    bos = leading_bos(tokenizer)
    eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for first in range(0, len(rendered), TEXTS_PER_CALL):
        chunk = rendered[first : first + TEXTS_PER_CALL]
        for item, (ids, weights) in zip(chunk, _encode_chunk(chunk, tokenizer), strict=True):
            if item.is_bare:
                # Data that already brings its own BOS or EOS does not get a second one.
                front = bos if ids[:1].tolist() != bos else []
                end = eos if ids[-1:].tolist() != eos else []
                ids = np.concatenate([packed(front), ids, packed(end)])
                weights = np.concatenate([np.zeros(len(front)), weights, np.ones(len(end))])
            is_plain = item.weights.count(1) == len(item.weights)
            yield Sample(ids, weights > 0, None if is_plain else weights)


def tokenise_prompt(rendered: Rendered, tokenizer: Tokenizer) -> npt.NDArray[np.int32]:
    ids = _encode(rendered.text, tokenizer)
    bos = leading_bos(tokenizer)
    return np.array(bos + ids if rendered.is_bare and ids[:1] != bos else ids, dtype=np.int32)


def sample_of_tokens(tokens: Tokens, tokenizer: Tokenizer, train_on_inputs: bool, where: str) -> Sample:
    """The sample of ids made elsewhere; an id outside the tokenizer's vocabulary is a DataError."""
    vocabulary = len(tokenizer)
    for i, token in enumerate(tokens.ids):
        if token >= vocabulary:
            raise DataError(f"token {i} is {token}, but the tokenizer knows {vocabulary} tokens.", where=where)
    supervised = [True] * len(tokens.ids) if train_on_inputs else tokens.supervised
    return Sample(np.array(tokens.ids, dtype=np.int32), np.array(supervised, dtype=np.bool_))


def leading_bos(tokenizer: Tokenizer) -> list[int]:
    """The BOS token as a list; empty for a tokenizer that adds none in front of a text. Having a BOS token is not
    enough: several tokenizers name one that their models never saw at the start of a text."""
    if tokenizer.bos_token_id is None:
        return []
    bos = [tokenizer.bos_token_id]
    alone = tokenizer.encode("a", add_special_tokens=False)
    return bos if tokenizer.encode("a", add_special_tokens=True)[:1] == bos != alone[:1] else []


def _encode(text: str, tokenizer: Tokenizer) -> list[int]:
    """Token ids without any special ones; not verbose, because transformers has advice on texts of any length."""
    return tokenizer.encode(text, add_special_tokens=False, verbose=False)


def _encode_chunk(chunk: Sequence[Rendered], tokenizer: Tokenizer) -> Iterator[tuple[Ids, Weights]]:
    whole = _encode_whole(chunk, tokenizer) if tokenizer.is_fast else [None] * len(chunk)
    for item, result in zip(chunk, whole, strict=True):
        if result is None or result.weights is None:
            yield _encode_pieces(item, tokenizer)
        else:
            yield result.tokens, result.weights


def _encode_whole(chunk: Sequence[Rendered], tokenizer: Tokenizer) -> Sequence[Encoded | None]:
    quick = ByteLevel.of(tokenizer)
    if quick is None or quick.is_proven is False:
        return _encode_with_offsets(chunk, tokenizer)
    result = quick.encode(chunk)
    if quick.is_proven is None:
        with_offsets = _encode_with_offsets(chunk, tokenizer)
        quick.is_proven = all(
            one is None or one.is_same(other) for one, other in zip(result, with_offsets, strict=True)
        )
        return with_offsets
    missing = iter(
        _encode_with_offsets([item for item, one in zip(chunk, result, strict=True) if one is None], tokenizer)
    )
    return [next(missing) if one is None else one for one in result]


def _encode_with_offsets(chunk: Sequence[Rendered], tokenizer: Tokenizer) -> list[Encoded]:
    if not chunk:
        return []
    encoded: Any = tokenizer(
        [item.text for item in chunk],
        add_special_tokens=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    return [
        Encoded(packed(ids), _weights(encoding.token_to_chars, len(ids), item))
        for item, ids, encoding in zip(chunk, encoded["input_ids"], encoded.encodings, strict=True)
    ]


def _weights(chars: Callable[[int], tuple[int, int]], num_tokens: int, item: Rendered) -> Weights | None:
    """Weight of each token in the loss, or None if one reaches from outside into a span. `chars` maps tokens to
    characters. Tokens are in the order of their characters, so the borders of a span are located by bisection: listing
    the characters of all tokens takes longer than tokenising."""

    def start_of(token: int) -> int:
        # Some tokenizers leave the space out of a token's characters; the token stands for it all the same.
        return min(chars(token)[0], chars(token - 1)[1] if token else 0)

    tokens, result = range(num_tokens), []
    for (start, end), weight in item.weighted_spans:
        first = bisect.bisect_left(tokens, start, key=start_of)
        if first and chars(first - 1)[1] > start:
            return None
        # Most spans reach to the last token, or past it.
        is_last = num_tokens > first and start_of(num_tokens - 1) < end
        result.append((first, num_tokens if is_last else bisect.bisect_left(tokens, end, first, key=start_of), weight))
    return spread(result, num_tokens)


def _encode_pieces(item: Rendered, tokenizer: Tokenizer) -> tuple[Ids, Weights]:
    ids: list[int] = []
    weights: list[float] = []
    done = 0
    for (start, end), weight in (*item.weighted_spans, ((len(item.text), len(item.text)), 0.0)):
        for piece, counted in ((item.text[done:start], 0.0), (item.text[start:end], weight)):
            tokens = _encode(piece, tokenizer) if piece else []
            ids += tokens
            weights += [counted] * len(tokens)
        done = end
    return packed(ids), np.array(weights)


def sample_of_passage(passage: Passage, tokenizer: Tokenizer) -> Sample:
    """The text with the special tokens that the tokenizer adds around one; its last token has the label."""
    ids = tokenizer.encode(passage.text, add_special_tokens=True, verbose=False)
    tokens = np.array(ids, dtype=np.int32)
    return Sample(tokens, np.zeros(len(tokens), np.bool_)).labelled_end(passage.label)


def sample_of_words(words: Words, tokenizer: Tokenizer, where: str) -> Sample:
    """The words one after the other; the first token of each has its label."""
    if not tokenizer.is_fast:
        raise ConfigError("this tokenizer does not map tokens to words.", where="objective")
    encoded: Any = tokenizer(list(words.words), is_split_into_words=True, verbose=False)
    labels = np.full(len(encoded["input_ids"]), np.nan, dtype=np.float32)
    before = None
    for index, word in enumerate(encoded.word_ids()):
        if word is not None and word != before and words.labels[word] is not None:
            labels[index] = words.labels[word]
        before = word
    return Sample(np.array(encoded["input_ids"], dtype=np.int32), ~np.isnan(labels), None, labels)


_EXTENDED: weakref.WeakKeyDictionary[Any, dict[tuple[str, ...], Any]] = weakref.WeakKeyDictionary()


def with_new_tokens(tokenizer: Any, tokens: Sequence[str]) -> Any:
    """The tokenizer with additional tokens; the same object for the same tokens."""
    if not tokens:
        return tokenizer
    made = _EXTENDED.setdefault(tokenizer, {})
    if tuple(tokens) not in made:
        extended = copy.deepcopy(tokenizer)
        extended.add_tokens(list(tokens))
        made[tuple(tokens)] = extended
    return made[tuple(tokens)]


def new_token_ids(tokenizer: Any, tokens: Sequence[str]) -> tuple[int, ...]:
    """Their ids; a token that the tokenizer has already keeps its id."""
    if not tokens:
        return ()
    return tuple(with_new_tokens(tokenizer, tokens).convert_tokens_to_ids(list(tokens)))
