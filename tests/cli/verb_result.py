"""What the tests of verbs know of a command that has ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    code: int
    out: str
    err: str


Weft = Callable[..., Result]
"""Runs `weft ARGS...`."""
