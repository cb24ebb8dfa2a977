import math
from typing import Any

import pytest
from synthetic_sweep import sweep_board

from weft.report.sweep_board import read_board
from weft.report.sweep_params import number_label, shortened, value_label, varied_axes


def board_of(*params: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A board of done trials with the given parameters; the first is the best."""
    rows = [
        {"rank": i + 1, "number": i, "name": f"t{i}", "state": "done", "value": 1.0 + i, "params": given}
        for i, given in enumerate(params)
    ]
    return {"metric": "eval_loss", "mode": "min", "sampler": "grid", "trials": rows, **fields}


def axis_of(*values: Any, **fields: Any) -> Any:
    (axis,) = varied_axes(read_board(board_of(*({"p": value} for value in values), **fields)))
    return axis


def test_read_board_when_ranks_are_mixed_or_missing_then_trials_come_in_order_of_rank() -> None:
    rows = [{"rank": None, "number": 4}, {"rank": 2, "number": 0}, {"number": 3}, {"rank": 1, "number": 7}]
    assert [t.number for t in read_board({"trials": rows}).trials] == [7, 0, 3, 4]


def test_read_board_when_values_are_not_finite_then_they_are_left_out() -> None:
    points = [{"step": 1, "value": math.nan}, {"step": 2, "value": 0.5, "tokens": math.inf}, {"value": 1.0}, None]
    row = {"state": "done", "value": math.nan, "points": points, "losses": [[1, math.inf], [2, 3.0], [4], 5]}
    (trial,) = read_board({"trials": [row | {"tokens": 10**400}], "seconds": math.nan}).trials
    assert trial.value is None
    assert [(p.step, p.value, p.tokens) for p in trial.points] == [(2.0, 0.5, None)]
    assert trial.losses == ((2.0, 3.0),)
    assert trial.tokens == 0


def test_best_when_the_first_failed_or_has_no_value_then_it_is_the_next() -> None:
    board = board_of({}, {}, {})
    board["trials"][0]["state"] = "failed"
    board["trials"][1]["value"] = math.nan
    best = read_board(board).best
    assert best is not None
    assert best.name == "t2"
    assert read_board({}).best is None


def test_counts_then_states_come_in_reading_order_and_unknown_ones_last() -> None:
    rows = [{"state": s} for s in ("failed", "odd", "done", "stopped", "done")]
    assert read_board({"trials": rows}).counts() == {"done": 2, "stopped": 1, "failed": 1, "odd": 1}
    assert list(read_board({"trials": rows}).counts()) == ["done", "stopped", "failed", "odd"]


def test_left_out_when_a_trial_stopped_after_a_quarter_then_three_times_as_much_was_to_come() -> None:
    row = {"state": "stopped", "steps": 30, "total_steps": 120}
    kinds = [row, row | {"state": "done"}, row | {"steps": 0}, row | {"total_steps": 0}]
    assert [t.left_out for t in read_board({"trials": kinds}).trials] == [3.0, 0.0, 0.0, 0.0]


def test_tokens_when_the_board_has_none_then_they_are_those_this_sweep_trained() -> None:
    rows = [{"tokens": 5}, {"tokens": 7}, {"tokens": 100, "origin": "runs/earlier"}]
    assert read_board({"trials": rows}).tokens == 12


def test_speed_up_when_a_time_is_missing_then_there_is_none() -> None:
    assert read_board({"seconds": 10.0, "one_by_one_seconds": 47.0}).speed_up == pytest.approx(4.7)
    assert read_board({"seconds": 10.0, "one_by_one_seconds": None}).speed_up is None
    assert read_board({"seconds": 0.0, "one_by_one_seconds": 47.0}).speed_up is None


def test_varied_axes_then_fixed_parameters_have_none_and_dotted_names_are_short_where_clear() -> None:
    axes = varied_axes(read_board(sweep_board(40)))
    assert [(a.label, a.kind) for a in axes] == [
        ("learning_rate", "log"),
        ("r", "choice"),
        ("lora_alpha", "choice"),
        ("dropout", "linear"),
        ("target_modules", "choice"),
    ]
    alike = [{"a.r": i, "b.r": i} for i in range(2)]
    assert [a.label for a in varied_axes(read_board(board_of(*alike)))] == ["a.r", "b.r"]


def test_axis_when_few_trials_have_all_different_numbers_then_they_were_drawn_from_a_range() -> None:
    """Eight random learning rates are no list of choices; four ranks that come back are."""
    assert axis_of(1e-4, 2e-4, 5e-4, 1e-3, 3e-3, 4e-3, 7e-3, 1e-2).kind == "log"
    assert axis_of(8, 16, 32, 64, 16, 8, 64, 32).kind == "choice"


def test_axis_when_the_sweep_states_how_a_range_is_searched_then_it_is_drawn_so() -> None:
    """However few trials there are and however near its ends; a few whole numbers stay choices."""
    narrow = [1e-4 * 1.2**i for i in range(8)]
    wide = [10.0**-i for i in range(9)]
    assert [axis_of(*values).kind for values in (narrow, wide)] == ["linear", "log"]
    assert [axis_of(*values, scales={"p": "log"}).kind for values in (narrow, narrow[:2], wide)] == ["log"] * 3
    assert axis_of(*wide, scales={"p": "linear"}).kind == "linear"
    assert axis_of(1, 2, 3, 1, 2, 3, scales={"p": "linear"}).kind == "choice"
    assert axis_of(0.0, *narrow, scales={"p": "log"}).kind == "linear"


def test_axis_when_values_are_numbers_then_choices_are_in_their_order_and_others_after() -> None:
    assert axis_of(64, 8, "auto", 16, None).choices == ("8", "16", "64", "auto", "–")
    assert axis_of(True, False).choices == ("false", "true")


def test_position_then_ends_are_0_and_1_choices_have_equal_room_and_missing_is_none() -> None:
    log = axis_of(*(10.0**-i for i in range(9)))
    assert log.kind == "log"
    assert [log.position({"p": x}) for x in (1e-8, 1e-4, 1.0)] == pytest.approx([0.0, 0.5, 1.0])
    assert log.value_at(0.5) == pytest.approx(1e-4)
    assert log.position({}) is None
    linear = axis_of(*range(10))
    assert (linear.kind, linear.position({"p": 4.5}), linear.position({"p": "x"})) == ("linear", 0.5, None)
    choice = axis_of(["q", "v"], ["q"])
    assert choice.position({"p": ["q", "v"]}) == 0.75
    assert choice.position({"p": "other"}) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2e-4, "2e-4"),
        (1.22e-3, "1.22e-3"),
        (0.005, "0.005"),
        (0.05, "0.05"),
        (0.0, "0"),
        (16, "16"),
        (16.0, "16"),
        (123456.0, "1.235e5"),
        (-0.25, "-0.25"),
        (math.inf, "inf"),
        (True, "true"),
        (None, "–"),
        (["q_proj", 3], "q_proj, 3"),
    ],
)
def test_value_label_then_it_is_what_a_person_writes(value: Any, text: str) -> None:
    assert value_label(value) == text


def test_labels_when_they_must_be_short_then_no_digit_before_the_point_is_lost() -> None:
    assert number_label(1234.6, digits=2) == "1235"
    assert shortened("q_proj, k_proj, v_proj", 8) == "q_proj…"
