"""The text of an answer that grows by tokens, and where a stop string ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class AnswerText:
    """The text of an answer that grows by tokens. Only its last tokens are decoded again for each of them.

    The text of the last `KEPT` tokens alone must be the end of the whole text; else, such as in the middle of a
    character, the tokens before them are decoded again as well.
    """

    KEPT = 16
    """Tokens whose text may still change by those that follow."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self.tokens: list[int] = []
        self._start = 0
        """Index of the first token that is decoded again."""
        self._before = ""
        """Text of the tokens before that one."""

    def add(self, token: int) -> str:
        """The whole text with one more token."""
        self.tokens.append(token)
        text = self._before + self._decode(self.tokens[self._start :])
        if len(self.tokens) - self._start >= 4 * self.KEPT:
            last = self._decode(self.tokens[-self.KEPT :])
            if last and text.endswith(last) and not last.startswith("\N{REPLACEMENT CHARACTER}"):
                self._start, self._before = len(self.tokens) - self.KEPT, text[: len(text) - len(last)]
        return text

    def whole(self) -> str:
        return self._decode(self.tokens)


class TokenTexts(dict[int, str]):
    """The texts of single tokens. Some tokenizers drop a space in front of the first; so each is decoded twice in a
    row."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        super().__init__()
        self._decode = decode

    def __missing__(self, token: int) -> str:
        once, twice = (self._decode([token] * times) for times in (1, 2))
        self[token] = twice[len(once) :]
        return self[token]


def before_stop(text: str, stops: Sequence[str]) -> str | None:
    """The text before the first stop string; None if it has none."""
    found = [at for stop in stops if stop and (at := text.find(stop)) >= 0]
    return text[: min(found)] if found else None


def safe_length(text: str, stops: Sequence[str]) -> int:
    """Length of the final part of a growing text: without an end that may begin a stop string or be part of a
    character."""
    end = len(text.rstrip("\N{REPLACEMENT CHARACTER}"))
    for stop in stops:
        for length in range(min(len(stop) - 1, end), 0, -1):
            if text[:end].endswith(stop[:length]):
                end -= length
                break
    return end
