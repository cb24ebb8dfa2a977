import random
from typing import Any

import pytest
from synthetic_sweep import sweep_board

from weft.report.sweep_board import Board, read_board
from weft.report.sweep_params import MIN_TRIALS, importances, num_measured


def searched(values: list[tuple[dict[str, Any], float]], mode: str = "min") -> Board:
    rows = [{"number": i, "state": "done", "params": params, "value": v} for i, (params, v) in enumerate(values)]
    return read_board({"trials": rows, "mode": mode})


def test_importances_when_one_parameter_decides_then_it_is_first_and_clear_and_noise_is_not() -> None:
    found = importances(read_board(sweep_board(120)))
    assert found[0].name == "learning_rate"
    assert found[0].share > 0.6
    assert found[0].is_clear
    assert not next(i for i in found if i.name == "lora_alpha").is_clear


def test_importances_when_a_choice_explains_all_then_its_share_is_known_by_hand() -> None:
    found = importances(searched([({"p": "ab"[i % 2]}, float(i % 2)) for i in range(8)]))
    assert [(i.name, i.share, i.num_trials) for i in found] == [("p", pytest.approx(1.0), 8)]
    # Places 0..7 in two halves: 32 of 42 lie between the groups; corrected 1 - (10/42) * 7/6.
    found = importances(searched([({"p": "ab"[i // 4]}, float(i)) for i in range(8)]))
    assert found[0].share == pytest.approx(1 - (10 / 42) * 7 / 6)


def test_importances_when_a_log_range_has_few_values_then_each_is_a_group() -> None:
    """Quantiles of a range that is mostly met at its lower end would put all trials into one."""
    rows = [({"r": 4 if i < 7 else 8}, float(i)) for i in range(11)]
    trials = [{"number": i, "state": "done", "params": params, "value": v} for i, (params, v) in enumerate(rows)]
    found = importances(read_board({"trials": trials, "mode": "min", "scales": {"r": "log"}}))
    assert [(i.name, i.best_group) for i in found] == [("r", "4")] and found[0].share > 0.5


def test_importances_when_more_is_better_then_the_best_group_is_the_other() -> None:
    values = [({"p": "ab"[i // 6]}, float(i)) for i in range(12)]
    assert importances(searched(values))[0].best_group == "a"
    assert importances(searched(values, "max"))[0].best_group == "b"


def test_importances_when_one_trial_diverged_then_it_does_not_decide() -> None:
    values = [({"p": i / 40}, float(i)) for i in range(40)]
    calm = importances(searched(values))[0].share
    assert importances(searched([*values[:-1], (values[-1][0], 1e30)]))[0].share == pytest.approx(calm)


def test_importances_when_a_range_is_cut_then_the_best_part_is_named() -> None:
    found = importances(searched([({"p": 10.0 ** (-i / 10)}, abs(i - 35.0)) for i in range(50)]))
    assert found[0].best_group == "1.3e-4 to 0.001"


@pytest.mark.parametrize("num", [0, 1, MIN_TRIALS - 1])
def test_importances_when_trials_are_few_then_there_are_none(num: int) -> None:
    assert importances(searched([({"p": i}, float(i)) for i in range(num)])) == []


def test_importances_when_too_little_is_known_then_there_are_none() -> None:
    assert importances(searched([({"p": i % 2}, 1.0) for i in range(20)])) == []
    assert importances(searched([({"p": f"own {i}"}, float(i)) for i in range(20)])) == []
    assert importances(searched([({"p": 1}, float(i)) for i in range(20)])) == []


def test_importances_when_a_trial_lacks_the_parameter_or_failed_then_it_does_not_count() -> None:
    rows = [{"number": i, "state": "done", "params": {"p": i % 2}, "value": float(i)} for i in range(10)]
    rows += [{"number": 10, "state": "failed", "params": {"p": 1}, "value": 3.0}, {"number": 11, "state": "done"}]
    rows += [{"number": 12, "state": "done", "params": {}, "value": 9.0}]
    board = read_board({"trials": rows})
    assert [i.num_trials for i in importances(board)] == [10]
    assert num_measured(board) == 11


def test_chance_when_objectives_are_noise_then_few_parameters_pass_it() -> None:
    passed = 0
    for seed in range(40):
        chance = random.Random(seed)
        values = [({"p": chance.random()}, chance.random()) for _ in range(30)]
        passed += importances(searched(values))[0].is_clear
    assert passed <= 6
