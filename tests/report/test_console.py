"""What goes into a pipe is whole."""

from __future__ import annotations

import pytest
from rich.table import Table

from weft.report.readable import output_console


def table() -> Table:
    made = Table("path", "remarks", box=None)
    made.add_row("/a/long/path/" * 9, "and what there is to report about it " * 9)
    return made


def test_console_when_its_output_is_piped_then_lines_and_cells_stay_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.delenv("COLUMNS", raising=False)
    output_console().print("word " * 99)
    output_console().print(table())
    line, _, row = capsys.readouterr().out.splitlines()
    assert line.strip() == ("word " * 99).strip()
    assert "/a/long/path/" * 9 in row and ("and what there is to report about it " * 9).strip() in row


def test_console_when_the_environment_sets_the_width_of_a_pipe_then_it_is_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("COLUMNS", "40")
    output_console().print(table())
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 40
