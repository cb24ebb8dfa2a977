"""Says in one sentence what pydantic finds wrong with a request: the field, what we got and what we accept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.errors import closest
from weft.settings.fields import describe

NOT_SERVED = "not_served"
"""The type of error for a field that OpenAI has and we do not; its context says which values we accept anyway."""
_OF_A_KIND = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
_WITHIN = {
    "literal_error": "{expected}",
    "greater_than_equal": "at least {ge:,}",
    "greater_than": "more than {gt:,}",
    "less_than_equal": "at most {le:,}",
    "less_than": "less than {lt:,}",
    "too_short": "at least {min_length:,}",
    "too_long": "at most {max_length:,}",
    "string_too_short": "text of {min_length:,} or more characters",
    "string_too_long": "text of at most {max_length:,} characters",
}
_PATTERNS = {
    "^[A-Za-z0-9._-]{1,64}$": "1 to 64 letters, digits, dots, dashes and underscores",
    "^[0-9a-fA-F]{32}$": "32 hexadecimal digits",
}


@dataclass(frozen=True)
class RefusalText:
    """The text, the field and the code of a 400."""

    message: str
    param: str | None
    code: str


def in_words(problems: Sequence[Any], body: Any = None, known: Sequence[str] = ()) -> RefusalText:
    """Describes the first problem; `body` is what was sent, if anything, and `known` are the names of its fields."""
    first = _param(problems[0], body)
    # A field with several accepted types has a problem for each; the deepest belongs to the type that was sent.
    below = [p for p in problems if _is_below(_param(p, body), first)]
    problem = max(below, key=lambda p: (_param(p, body) or "").count("."))
    param, kind, context = _param(problem, body), problem.get("type"), problem.get("ctx") or {}
    if kind == "extra_forbidden":
        guess = closest(str(param), list(known)) if "." not in str(param) else None
        hint = f". Did you mean {guess}?" if guess else ""
        return RefusalText(f"Unrecognized request argument supplied: {param}{hint}", param, "unknown_parameter")
    if kind == "missing":
        return RefusalText(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    if kind == NOT_SERVED:
        only = f"got {_got(problem)}; only {context['accepted']} is available here."
        message = f"Invalid value for '{param}': {only}" if context["accepted"] else f"'{param}' is not available here."
        return RefusalText(f"{message} Leave it out.", param, "unsupported_parameter")
    message = _message([p for p in problems if _param(p, body) == param])
    return RefusalText(f"Invalid value for '{param}': {message}" if param else message, param, "invalid_value")


def _message(problems: Sequence[Any]) -> str:
    """Says what one field got and what it accepts."""
    if problems[0].get("type") == "value_error":
        return f"{problems[0]['msg'].removeprefix('Value error, ')}."
    # Where a value has one of the accepted types, the other types are not worth mentioning.
    fitting = [p for p in problems if p.get("type") not in _OF_A_KIND]
    if any(p.get("type") != "literal_error" for p in fitting):
        problems = fitting
    accepted = list(dict.fromkeys(_accepted(problem) for problem in problems))
    if "a number" in accepted and "a whole number" in accepted:
        accepted.remove("a whole number")
    *others, last = accepted
    return f"got {_got(problems[0])}; use {', '.join(others)}{' or ' if others else ''}{last}."


def _accepted(problem: Any) -> str:
    kind, given = problem.get("type"), problem.get("ctx") or {}
    context = {name: int(v) if isinstance(v, float) and v.is_integer() else v for name, v in given.items()}
    if kind in _OF_A_KIND:
        return _OF_A_KIND[kind]
    if kind == "string_pattern_mismatch":
        return _PATTERNS[str(context["pattern"])]
    if kind in _WITHIN:
        return _WITHIN[kind].format(**context)
    return str(problem.get("msg", "something else"))


def _got(problem: Any) -> str:
    value = problem.get("input")
    if problem.get("type") in ("too_short", "too_long"):
        return f"a list of {len(value):,}"
    if isinstance(value, bool):
        return "true" if value else "false"
    return "an object" if isinstance(value, Mapping) else describe(value)


def _is_below(param: str | None, other: str | None) -> bool:
    return param == other or (param or "").startswith(f"{other}.")


def _param(problem: Any, body: Any) -> str | None:
    """Returns the path to a field, without the names of its types, which pydantic adds where there are several."""
    parts = list(problem.get("loc", ()))
    # FastAPI puts the place of a field first, but a field of the body may have the same name.
    if parts and parts[0] in ("body", "query", "path", "header") and not (isinstance(body, dict) and parts[0] in body):
        parts = parts[1:]
    if body is None:
        return ".".join(map(str, parts)) or None
    found = []
    for place, part in enumerate(parts):
        is_there = part in body if isinstance(body, dict) else _has(body, part)
        if is_there:
            body = body[part]
        if is_there or (problem.get("type") == "missing" and place == len(parts) - 1):
            found.append(str(part))
    return ".".join(found) or None


def _has(items: Any, place: Any) -> bool:
    return isinstance(items, list) and isinstance(place, int) and place < len(items)
