"""Makes token ids and their weights in the loss from rendered text, and samples of labelled texts and words.

Each text is tokenised whole, so that the ids are those that the model will read; a token is supervised if its first
character is trained. Only where one token would reach from the prompt into a trained span is the text tokenised in
pieces: in generation the prompt is tokenised alone and no token can reach past its end.
"""

from __future__ import annotations

import bisect
import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.data.chat.chat_template import Tokenizer
from weft.data.conversation import Passage, Rendered, Tokens, Words
from weft.data.sample import Sample
from weft.data.tokens.byte_level import ByteLevel, Encoded, Ids, Weights, packed, spread
from weft.errors import ConfigError, DataError

TEXTS_PER_CALL = 1024
"""A fast tokenizer spreads the texts of one call over all cores; more at a time only takes memory."""


def tokenise(rendered: Sequence[Rendered], tokenizer: Tokenizer) -> Iterator[Sample]:
    """The samples of rendered texts, in order."""
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
    """The BOS token as a list; empty for a tokenizer that adds none in front of a text.

    Having a BOS token is not enough: several tokenizers name one that their models never saw at the start of a text.
    """
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
    """Each text as a whole, by the lengths of its tokens where they suffice."""
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
    """Each text as a whole, by the characters of its tokens."""
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
    """Weight of each token in the loss, or None if one reaches from outside into a span.

    `chars` maps tokens to characters. Tokens are in the order of their characters, so the borders of a span are located
    by bisection: listing the characters of all tokens takes longer than tokenising.
    """

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
    """Tokenises the text cut at the borders of its trained spans."""
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
