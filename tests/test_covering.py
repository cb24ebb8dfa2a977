"""What `make test` leaves out holds nothing that its other cases do not hold in pairs."""

from __future__ import annotations

import itertools

import pytest
from covering import chosen, each_pair, each_value


def fast(cases):
    return [case for case in cases if not hasattr(case, "marks")]


def test_each_pair_when_there_are_four_axes_then_every_pair_of_values_is_run_by_few_cases():
    axes = ["abc", [1, 2, 3], [True, False], "xy"]
    cases = each_pair(*axes)
    assert len(cases) == 36 and len(fast(cases)) <= 10
    for (i, one), (j, other) in itertools.combinations(enumerate(axes), 2):
        assert {(case[i], case[j]) for case in fast(cases)} == set(itertools.product(one, other))


def test_each_value_when_axes_differ_in_length_then_every_value_is_run_once_or_more():
    cases = each_value("abcd", [1, 2])
    assert len(cases) == 8 and fast(cases) == [("a", 1), ("b", 2), ("c", 1), ("d", 2)]


def test_chosen_when_some_cases_are_named_then_the_others_are_slow_and_keep_their_ids():
    cases = chosen(["a", pytest.param("b", id="bee"), ("c", 1)], 0)
    assert cases[0] == "a" and [case.marks[0].name for case in cases[1:]] == ["slow", "slow"]
    assert [case.values for case in cases[1:]] == [("b",), ("c", 1)] and cases[1].id == "bee"
