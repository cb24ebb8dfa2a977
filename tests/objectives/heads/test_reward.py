"""Rewards: pairs with a margin, told by the names that pairs have."""

import pytest

from weft.errors import DataError
from weft.objectives.heads.reward import Reward

ROW = {"prompt": "a", "chosen": "b", "rejected": "c"}


@pytest.mark.parametrize(("columns", "margin"), [({}, 0.0), ({"margin": 2}, 2.0), ({"margin": None}, 0.0)])
def test_row_when_it_has_a_margin_or_none_then_both_answers_are_labelled_with_it(columns, margin):
    assert [part.label for part in Reward().parts({**ROW, **columns}, "x")] == [margin, margin]


def test_row_when_its_margin_is_no_number_then_is_refused():
    with pytest.raises(DataError, match=r"^rows.jsonl line 2: margin is 'much'; expected a number\.$"):
        Reward().parts({**ROW, "margin": "much"}, "rows.jsonl line 2")


def test_score_when_the_rejected_answer_is_ahead_then_the_pair_is_wrong():
    score = Reward().score(0.0, 0.9, [-1.0, 0.5])
    assert score["rewards/accuracies"].total == 0 and score["rewards/margins"].total == -1.5
