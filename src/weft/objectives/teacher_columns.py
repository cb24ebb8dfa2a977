"""Reads what a teacher has said from the columns of a row: for each supervised token, its most likely ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from weft.errors import DataError
from weft.objectives.objective import TeacherTopK
from weft.settings.fields import describe

IDS, LOGPROBS = "teacher_ids", "teacher_logprobs"
"""The columns."""
MOST_TOKENS = 1000
"""Most that a teacher may name for one."""


def read_teacher_top_k(values: Mapping[str, Any], where: str) -> TeacherTopK:
    """What a row's teacher has said, the most likely tokens first; a column that is wrong is a DataError."""
    ids, logprobs = (_lists(name, values.get(name), where) for name in (IDS, LOGPROBS))
    if len(ids) != len(logprobs) or len({len(each) for each in (*ids, *logprobs)}) > 1:
        found = f"{IDS} and {LOGPROBS} differ in size"
        raise DataError(f"{found}; expected as many tokens for each supervised token in both.", where=where)
    if ids and len(ids[0]) > MOST_TOKENS:
        raise DataError(f"{IDS} names {len(ids[0]):,} tokens for each; the most is {MOST_TOKENS:,}.", where=where)
    for place, (own, said) in enumerate(zip(ids, logprobs, strict=True)):
        if not all(type(token) is int and token >= 0 for token in own) or len(set(own)) < len(own):
            raise DataError(f"{IDS}[{place}] is {_short(own)}; expected different token ids.", where=where)
        if not all(type(x) in (int, float) and math.isfinite(x) for x in said):
            raise DataError(f"{LOGPROBS}[{place}] is {_short(said)}; expected finite numbers.", where=where)
    ordered = [sorted(zip(said, own, strict=True), reverse=True) for own, said in zip(ids, logprobs, strict=True)]
    return TeacherTopK([[token for _, token in each] for each in ordered], [[x for x, _ in each] for each in ordered])


def _lists(name: str, column: Any, where: str) -> list[list[Any]]:
    """A column, if it is a list of lists that are not empty."""
    if not isinstance(column, list):
        found = f"{name} is {describe(column)}"
        raise DataError(f"{found}; expected a list of tokens for each supervised token.", where=where)
    for place, each in enumerate(column):
        if not isinstance(each, list) or not each:
            raise DataError(f"{name}[{place}] is {_short(each)}; expected a list of tokens.", where=where)
    return column


def _short(value: Any) -> str:
    """A value as it is, or the front of it."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
