"""A value of the command line that its option does not take, in the one sentence that any other mistake gets."""

from __future__ import annotations

from typing import Any

import typer

from weft.errors import ConfigError

_ACCEPTED = {
    "greater_than_equal": "at least {ge:g}",
    "less_than_equal": "at most {le:g}",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "finite_number": "a number",
}
"""What typer's validation asks for, by its names of what is wrong."""


def wrong_value(error: typer.BadParameter) -> ConfigError:
    """The same error: which option, what it accepts, what it got."""
    return ConfigError(_reason(error), where=_name(error.param))


def _reason(error: typer.BadParameter) -> str:
    found: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
    accepted = _ACCEPTED.get(found[0]["type"]) if found else None
    if accepted is None:
        return error.message
    return f"must be {accepted.format(**found[0].get('ctx', {}))}, got {found[0]['input']}."


def _name(param: Any) -> str | None:
    """As the help writes it."""
    if param is None:
        return None
    is_option = param.param_type_name == "option"
    return " / ".join(param.opts) if is_option else param.metavar or param.name
