import itertools
import math
from typing import Any

import pytest
from synthetic_sweep import sweep_board

from weft.report.sweep_board import read_board
from weft.report.sweep_charts import FAILED_POSITION, MAX_POINTS, draw_sweep_charts, trial_spans
from weft.report.sweep_figure import BEST_COLOUR, STATE_COLOURS, STRENGTHS, fence, in_groups, looks


def own(figure: Any, trial: int) -> list[tuple[float, float]]:
    """The points of one trial's line."""
    return [
        (x, y)
        for trace in figure.data
        if trace.mode == "lines"
        for owner, x, y in zip(trace.customdata, trace.x, trace.y, strict=True)
        if owner == trial
    ]


def test_draw_sweep_charts_when_the_sweep_is_complete_then_all_are_there() -> None:
    assert list(draw_sweep_charts(read_board(sweep_board(12)))) == [
        "by_step",
        "by_tokens",
        "train_loss",
        "parallel",
        *(f"scatter_{i}" for i in range(5)),
        "trial_times",
    ]


def test_draw_sweep_charts_when_there_is_one_trial_then_nothing_is_compared() -> None:
    assert set(draw_sweep_charts(read_board(sweep_board(1)))) == {"by_step", "by_tokens", "train_loss", "trial_times"}
    assert draw_sweep_charts(read_board({})) == {}


def test_curves_then_every_trial_is_whole_and_separate() -> None:
    board = read_board(sweep_board(30))
    figure = draw_sweep_charts(board)["by_step"]
    for index, trial in enumerate(board.trials):
        assert own(figure, index) == [(p.step, pytest.approx(p.value, rel=1e-4)) for p in trial.points]
    for trace in figure.data:
        owners = list(trace.customdata or ()) if trace.mode == "lines" else []
        # Between two trials is a gap, so that no line leads from one to the other.
        assert all(a == b or None in (a, b) for a, b in itertools.pairwise(owners))
        assert [x is None for x in trace.x] == [owner is None for owner in owners] or not owners


def test_every_figure_then_its_last_trace_waits_for_the_picked_trial_and_others_have_a_state() -> None:
    board = read_board(sweep_board(40))
    for figure in draw_sweep_charts(board).values():
        *others, last = figure.data
        assert last.meta == {"picked": True}
        assert {trace.meta["job"] for trace in others} <= set(range(len(board.counts())))
        assert len(others) <= 2 * (len(STRENGTHS) + 3)


def test_looks_then_colour_is_the_state_strength_the_rank_and_the_best_stands_out() -> None:
    board = read_board(sweep_board(40))
    known = looks(board)
    assert [look.colour for look in known].count(BEST_COLOUR) == 1
    assert known[0].is_best
    done = [look.strength for look in known[1:] if look.state == "done"]
    assert done == sorted(done, reverse=True)
    assert set(done) == set(STRENGTHS)
    assert {look.colour for look in known if look.state == "stopped"} == {STATE_COLOURS["stopped"]}
    assert in_groups(board, range(40))[-1] == (known[0], [0])


def test_view_when_a_trial_went_astray_then_it_is_cut_and_counted_and_the_best_never() -> None:
    board = sweep_board(12, is_calm=True)
    board["trials"][5]["points"][2]["value"] = 1e6
    figure = draw_sweep_charts(read_board(board))["by_step"]
    low, high = figure.layout.yaxis.range
    assert low < min(p["value"] for t in board["trials"] for p in t["points"])
    assert high < 10
    assert figure.layout.meta == {"outside": 1}


def test_view_when_more_is_better_then_the_low_side_is_cut() -> None:
    board = sweep_board(12, is_calm=True) | {"mode": "max"}
    board["trials"][5]["points"][2]["value"] = -1e6
    low, high = draw_sweep_charts(read_board(board))["by_step"].layout.yaxis.range
    assert low > -10
    assert high > max(p["value"] for t in board["trials"] for p in t["points"])


def test_fence_when_values_are_few_equal_or_close_then_there_is_none() -> None:
    assert fence([1.0, 2.0, 1e9]) is None
    assert fence([1.0, 1.0, 1.0, 1.0, 1e9]) is None
    assert fence([1.0, 2.0, 3.0, 4.0, 5.0]) is None
    assert fence([1.0, 2.0, 3.0, 4.0, 1e9]) == 4.0


@pytest.mark.parametrize("mode", ["min", "max"])
def test_parallel_then_the_best_ends_at_the_top_and_the_worst_at_the_bottom(mode: str) -> None:
    board = sweep_board(12, is_calm=True) | {"mode": mode}
    values = [t["value"] for t in board["trials"]]
    figure = draw_sweep_charts(read_board(board))["parallel"]
    ends = [own(figure, i)[-1][1] for i in range(12)]
    best = values.index(min(values) if mode == "min" else max(values))
    worst = values.index(max(values) if mode == "min" else min(values))
    assert (ends[best], ends[worst]) == (1.0, 0.0)
    assert all(len(own(figure, i)) == 6 for i in range(12))


def test_parallel_when_trials_failed_then_they_end_below_the_axis_and_a_label_reports_it() -> None:
    board = read_board(sweep_board(120))
    figure = draw_sweep_charts(board)["parallel"]
    failed = [i for i, trial in enumerate(board.trials) if trial.state == "failed"]
    assert failed
    assert {own(figure, i)[-1][1] for i in failed} == {FAILED_POSITION}
    assert [a.text for a in figure.layout.annotations if a.y == FAILED_POSITION] == ["failed"]
    assert figure.layout.yaxis.range[0] < FAILED_POSITION


def test_parallel_when_all_objectives_are_equal_then_it_still_draws() -> None:
    board = sweep_board(3, is_calm=True)
    for trial in board["trials"]:
        trial["value"] = 1.0
    figure = draw_sweep_charts(read_board(board))["parallel"]
    assert {own(figure, i)[-1][1] for i in range(3)} == {0.5}


def test_scatter_when_a_parameter_is_a_choice_then_trials_stay_in_its_room() -> None:
    board = read_board(sweep_board(60))
    figure = draw_sweep_charts(board)["scatter_1"]
    assert list(figure.layout.xaxis.ticktext) == ["4", "8", "16", "32", "64"]
    for trace in figure.data[:-1]:
        for owner, x in zip(trace.customdata, trace.x, strict=True):
            rank = board.trials[owner].params["adapter.r"]
            assert figure.layout.xaxis.ticktext[round(x)] == str(rank)


def test_scatter_when_a_range_is_logarithmic_then_so_is_its_axis_and_values_are_the_real_ones() -> None:
    board = read_board(sweep_board(60))
    figure = draw_sweep_charts(board)["scatter_0"]
    assert figure.layout.xaxis.type == "log"
    for trace in figure.data[:-1]:
        rates = [board.trials[owner].params["learning_rate"] for owner in trace.customdata]
        assert list(trace.x) == pytest.approx(rates, rel=1e-3)


@pytest.mark.parametrize(("high", "ticks"), [(1e-2, 1), (5e-3, "D2"), (2e-4, None)])
def test_scatter_when_an_axis_is_logarithmic_then_its_labels_have_room(high: float, ticks: int | str | None) -> None:
    rates = [1e-4 * (high / 1e-4) ** (step / 11) for step in range(12)]
    trials = [
        {"name": f"t{i}", "state": "done", "value": float(i), "params": {"lr": rate}, "rank": i}
        for i, rate in enumerate(rates)
    ]
    figure = draw_sweep_charts(read_board({"trials": trials}))["scatter_0"]
    assert (figure.layout.xaxis.type, figure.layout.xaxis.dtick) == ("log" if ticks else None, ticks)


@pytest.mark.parametrize(("num", "is_named"), [(20, True), (60, False)])
def test_trial_times_then_each_bar_has_its_trials_name_while_there_is_room(num: int, is_named: bool) -> None:
    board = read_board(sweep_board(num))
    figure = draw_sweep_charts(board)["trial_times"]
    axis = figure.layout.yaxis
    assert axis.visible is is_named
    rows = dict(zip(axis.ticktext, axis.tickvals, strict=True))
    for index, trial in enumerate(board.trials):
        assert {row for _, row in own(figure, index)} <= {rows[trial.name]}


def test_trial_spans_then_they_start_and_end_where_the_trials_did() -> None:
    board = sweep_board(20)
    spans = {index: (start, end) for index, start, end in trial_spans(read_board(board))}
    assert spans == {index: (t["started_s"], t["ended_s"]) for index, t in enumerate(board["trials"])}


def test_trial_spans_when_a_trial_still_trains_then_until_now_and_without_a_start_of_its_own_not_at_all() -> None:
    board = sweep_board(4, is_calm=True)
    board["trials"][0]["ended_s"] = None
    board["trials"][1]["started_s"] = None
    board["trials"][2]["origin"] = "runs/earlier"
    spans = trial_spans(read_board(board))
    assert [index for index, *_ in spans] == [0, 3]
    assert spans[0][1:] == (board["trials"][0]["started_s"], board["seconds"])


def test_draw_sweep_charts_when_trials_are_many_and_long_then_points_are_capped() -> None:
    board = sweep_board(100)
    for trial in board["trials"]:
        trial["losses"] = [[step, math.sin(step)] for step in range(2000)]
    figure = draw_sweep_charts(read_board(board))["train_loss"]
    assert sum(len(trace.x) for trace in figure.data) <= MAX_POINTS + 100
