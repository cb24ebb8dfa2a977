"""Which cases of a product `make test` runs; the others are marked slow, so `make test-all` runs every one.

A fault in what two settings do to each other shows at some pair of their values. So of many axes every pair of values
is enough most of the time (`each_pair`), and where settings have little to do with each other, every value
(`each_value`): as many cases as the longest axis has values.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest

Case = tuple[int, ...]
"""Of every axis, the number of a value."""


def each_value(*axes: Sequence[Any]) -> list[Any]:
    """The product of the axes, of which the cases in step along all axes are run first."""
    longest = max(map(len, axes))
    return _marked(axes, {tuple(i % len(axis) for axis in axes) for i in range(longest)})


def each_pair(*axes: Sequence[Any]) -> list[Any]:
    """The product of three axes or more, of which a few cases that hold every pair of values are run first."""
    axis_pairs = list(itertools.combinations(range(len(axes)), 2))

    def pairs(case: Case) -> set[tuple[int, int, int, int]]:
        return {(i, case[i], j, case[j]) for i, j in axis_pairs}

    cases = list(itertools.product(*(range(len(axis)) for axis in axes)))
    missing = set().union(*map(pairs, cases))
    chosen: set[Case] = set()
    while missing:
        best = max(cases, key=lambda case: len(pairs(case) & missing))
        chosen.add(best)
        missing -= pairs(best)
    return _marked(axes, chosen)


def chosen(cases: Iterable[Any], *numbers: int) -> list[Any]:
    """All cases, of which those with these numbers are run first; a tuple holds several parameters."""
    return [_case(case, is_slow=i not in numbers) for i, case in enumerate(cases)]


def slow(*values: Any, id: str | None = None) -> Any:
    """A case that only `make test-all` runs."""
    return pytest.param(*values, id=id, marks=pytest.mark.slow)


def _marked(axes: Sequence[Sequence[Any]], chosen: Collection[Case]) -> list[Any]:
    numbered = itertools.product(*(enumerate(axis) for axis in axes))
    return [
        _case(tuple(value for _, value in case), is_slow=tuple(i for i, _ in case) not in chosen) for case in numbered
    ]


def _case(case: Any, *, is_slow: bool) -> Any:
    """A case as pytest takes it; what is slow already stays so."""
    if not is_slow:
        return case
    if hasattr(case, "marks"):
        return pytest.param(*case.values, id=case.id, marks=[*case.marks, pytest.mark.slow])
    return slow(*case) if isinstance(case, tuple) else slow(case)
