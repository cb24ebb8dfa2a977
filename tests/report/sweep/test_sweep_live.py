import io
from typing import Any

from rich.console import Console, RenderableType
from synthetic_sweep import sweep_board

from weft.report.sweep_page import leaderboard_table, status_line


def printed(what: RenderableType, width: int = 110) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_leaderboard_table_then_the_best_come_first_and_the_rest_is_counted() -> None:
    board = sweep_board(40)
    lines = printed(leaderboard_table(board, limit=5)).splitlines()
    assert [line.split()[1] for line in lines[1:6]] == [t["name"] for t in board["trials"][:5]]
    assert "… and 35 more trials" in lines[6]
    assert f"{board['trials'][0]['value']:.4f}" in lines[1]


def test_leaderboard_table_when_the_terminal_is_narrow_then_numbers_stay_whole() -> None:
    board = sweep_board(8)
    text = printed(leaderboard_table(board), width=62)
    for trial in board["trials"]:
        assert f"{trial['value']:.4f}" in text
        assert f"{trial['steps']}/120" in text
    assert max(map(len, text.splitlines())) <= 62
    assert len(text.splitlines()) == 9


def test_leaderboard_when_a_trials_name_is_too_long_then_both_of_its_ends_are_shown() -> None:
    """In the table and in the line below it."""
    board = sweep_board(2)
    board["trials"][0]["name"] = f"support-{'x' * 40}-rank-8"
    cut = "support-xxxxxx…xxxxxx-rank-8"
    assert printed(leaderboard_table(board)).splitlines()[1].split()[1] == cut
    assert f"({cut})" in printed(status_line(board))


def test_leaderboard_table_when_trials_train_then_some_are_always_shown() -> None:
    board = sweep_board(30)
    for trial in board["trials"][-4:]:
        trial["state"] = "training"
    text = printed(leaderboard_table(board, limit=6))
    assert text.count("training") == 3
    assert board["trials"][0]["name"] in text


def test_leaderboard_table_when_a_trial_failed_then_the_reason_stands_there_and_it_has_no_rank() -> None:
    row: dict[str, Any] = {"rank": 1, "name": "hot", "state": "failed", "reason": "the loss was\x1b[31m NaN"}
    text = printed(leaderboard_table({"trials": [row]}))
    assert "\x1b" not in text
    assert "the loss was" in text
    assert text.splitlines()[1].startswith("–")


def test_status_line_then_it_has_the_best_the_counts_and_the_speed_up() -> None:
    board = sweep_board(40)
    text = status_line(board).plain
    best = board["trials"][0]
    assert f"best eval_loss {best['value']:.4f} ({best['name']})" in text
    assert "4.70x as fast as one by one" in text
    assert " · 21 done · 19 stopped · " in text
    assert "left" not in text
    assert " · about 2:05 left · " in status_line(board, remaining_s=125.0).plain


def test_status_line_when_nothing_is_known_then_it_is_still_a_line() -> None:
    assert status_line({}).plain == "0 tokens"
    assert leaderboard_table({}).row_count == 0
