"""Rewards: pairs with a margin, recognised by the names that pairs have."""

import pytest

from weft.errors import DataError
from weft.objectives.heads import Reward

ROW = {"prompt": "a", "chosen": "b", "rejected": "c"}


@pytest.mark.parametrize(("columns", "margin"), [({}, 0.0), ({"margin": 2}, 2.0), ({"margin": None}, 0.0)])
def test_row_when_it_has_a_margin_or_none_then_both_answers_are_labelled_with_it(columns, margin):
    assert [part.label for part in Reward().parts({**ROW, **columns}, "x")] == [margin, margin]


@pytest.mark.parametrize("margin", ["much", 10**400, float("inf")])
def test_row_when_its_margin_is_no_number_then_is_refused(margin):
    with pytest.raises(DataError, match=r"^rows.jsonl line 2: margin is .*; expected a number of at most 1e\+18\.$"):
        Reward().parts({**ROW, "margin": margin}, "rows.jsonl line 2")


def test_score_when_the_rejected_answer_is_ahead_then_the_pair_is_wrong():
    score = Reward().score(0.0, 0.9, [-1.0, 0.5])
    assert score["rewards/accuracies"].total == 0 and score["rewards/margins"].total == -1.5
