"""A job's new tokens: the backbone's tokenizer with some more, for that job alone."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from typing import Any

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
