"""The progress of data that is being prepared is shown, on a terminal or in a log."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.data.prepared.prepare import PreparingBar, Standing, shown_by
from weft.data.sources import find_source


@pytest.fixture
def now() -> list[float]:
    """What time it is."""
    return [0.0]


def bar(now: list[float], folder: Path) -> PreparingBar:
    (folder / "train.jsonl").write_bytes(b"x" * 1000)
    return PreparingBar([find_source("train.jsonl", folder)], clock=lambda: now[0])


def advance(shown: PreparingBar, now: list[float], *times: float) -> None:
    for number, time in enumerate(times, 1):
        now[0] = time
        shown.advance(100, 5 * number)


def test_log_when_preparing_takes_long_then_has_a_line_every_ten_seconds_and_one_at_the_end(
    now: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with bar(now, tmp_path) as shown:
        advance(shown, now, 1, 3, 4, 12, 13.5, 20)
    assert capsys.readouterr().err.splitlines() == [
        "preparing train.jsonl: 10 rows (20%)",
        "preparing train.jsonl: 25 rows (50%)",
        "preparing train.jsonl: 30 rows done in 20 s",
    ]


def test_log_when_preparing_is_quick_then_stays_empty(
    now: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with bar(now, tmp_path) as shown:
        advance(shown, now, 0.5, 2)
    assert capsys.readouterr().err == ""


def test_log_when_a_row_is_wrong_then_never_reports_that_it_is_done(
    now: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    shown = bar(now, tmp_path)
    with pytest.raises(KeyError), shown:
        _advance_and_fail(shown, now)
    assert capsys.readouterr().err == "preparing train.jsonl: 5 rows (10%)\n"


def _advance_and_fail(shown: PreparingBar, now: list[float]) -> None:
    advance(shown, now, 3)
    raise KeyError


def test_terminal_when_preparing_takes_long_then_shows_a_bar(
    now: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with bar(now, tmp_path) as shown:
        advance(shown, now, 3, 30)
    log = capsys.readouterr().err
    assert "preparing train.jsonl" in log and "10 rows" in log and "done" not in log


def test_bar_when_a_command_shows_it_then_standard_error_stays_empty(
    now: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Two that draw on one terminal spoil each other's lines."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    seen: list[Standing | None] = []
    with shown_by(seen.append), bar(now, tmp_path) as shown:
        advance(shown, now, 1, 3, 30)
    title = "preparing train.jsonl"
    assert seen == [Standing(title, 200, 1000, 10), Standing(title, 300, 1000, 15), None]
    assert capsys.readouterr().err == ""
