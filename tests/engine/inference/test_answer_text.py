"""The text of a growing answer is that of all its tokens at every one of them, and no token is decoded often."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from tokenizers import Tokenizer, decoders, models

from weft.engine.inference.answer_text import AnswerText, TokenTexts, before_stop, safe_length
from weft.model.source import load_tokenizer

WORDS = [
    "\u2581the",
    "\u2581is",
    "n",
    "'t",
    "\u2581n't",
    ".",
    "\u2581.",
    "\u2581",
    "\u2581\u2581",
    "ab",
    "\u00e9",
    "\u0301",
    "<s>",
]


def of_pieces() -> tuple[Callable[[Sequence[int]], str], int]:
    """As Llama 2 and Gemma decode: spaces are pieces, other characters may be bytes, the first space is cut off."""
    pieces = [*WORDS, *(f"<0x{byte:02X}>" for byte in range(256))]
    core = Tokenizer(models.BPE(vocab={piece: id for id, piece in enumerate(pieces)}, merges=[], byte_fallback=True))
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return core.decode, len(pieces)


def of_bytes() -> tuple[Callable[[Sequence[int]], str], int]:
    tokenizer = load_tokenizer("tiny")
    return lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True)), len(tokenizer)


@pytest.mark.parametrize("kind", [of_pieces, of_bytes])
@pytest.mark.parametrize("seed", range(3))
def test_text_when_an_answer_grows_then_it_is_that_of_all_tokens_and_little_is_decoded_again(kind, seed):
    decode, vocabulary = kind()
    rng = random.Random(seed)
    decoded: list[int] = []

    def counted(tokens: Sequence[int]) -> str:
        decoded.append(len(tokens))
        return decode(tokens)

    answer, tokens = AnswerText(counted), list[int]()
    emoji = [len(WORDS) + byte for byte in "\U0001f9f5".encode()]
    while len(tokens) < 400:
        common = rng.random() < 0.8
        tokens += emoji if rng.random() < 0.05 else [rng.randrange(len(WORDS) if common else vocabulary)]
    for length, token in enumerate(tokens, 1):
        assert answer.add(token) == decode(tokens[:length])
    assert sum(decoded) < 100 * len(tokens) and answer.whole() == decode(tokens)


@pytest.mark.parametrize(
    ("text", "stops", "length"),
    [("hello", [], 5), ("war\ufffd", [], 3), ("hello ST", ["STOP"], 6), ("aaa", ["ab"], 2), ("abc", ["x"], 3)],
)
def test_text_when_it_may_be_the_start_of_a_stop_then_is_held_back(text, stops, length):
    assert safe_length(text, stops) == length


@pytest.mark.parametrize(
    ("text", "stops", "before"),
    [
        ("hello", ["l"], "he"),
        ("hello", ["lo", "el"], "h"),
        ("hello", ["x"], None),
        ("hello", ["hello"], ""),
        ("a", [], None),
    ],
)
def test_text_when_it_has_stop_strings_then_ends_before_the_first(text, stops, before):
    assert before_stop(text, stops) == before


@pytest.mark.parametrize("kind", [of_pieces, of_bytes])
def test_token_texts_when_joined_then_are_the_text_with_its_spaces(kind):
    decode, _ = kind()
    texts = TokenTexts(decode)
    tokens = [0, 1, 4, 5] if kind is of_pieces else [ord(c) % 90 + 5 for c in "warp and weft"]
    assert "".join(texts[token] for token in tokens).strip() == decode(tokens).strip()
    if kind is of_pieces:
        assert [texts[0], texts[2], texts[5]] == [" the", "n", "."]
