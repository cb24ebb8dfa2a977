"""Strict JSON: only finite numbers, no repeated keys, errors for deep nesting."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


def parse(data: bytes) -> Any:
    """The value of a UTF-8 JSON text; a ValueError names the problem."""
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
        )
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg.removesuffix(' at')} at line {error.lineno}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_object(path: Path) -> dict[str, Any]:
    """The object in a file; empty if it cannot be read."""
    try:
        found = parse(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def dump(value: Any) -> str:
    """Indented JSON that ends in a newline; a ValueError or TypeError if the value is not finite plain data."""
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def finite(value: Any) -> Any:
    """The value with every NaN and infinity replaced by null, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {repeated!r} is repeated")
    return result


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"it holds {name}, which is not a finite number")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"it holds {text}, which is not a finite number")
    return value
