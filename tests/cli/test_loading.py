"""A command's own line and the bar of its data share a terminal."""

import io
import threading

from rich.console import Console

from weft.cli.watch import loading
from weft.data.prepared.prepare import Standing, shower


def lines_while(*standings: Standing | None) -> list[str]:
    """What is on the terminal when these have been shown."""
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    with loading(console):
        show = shower()
        assert show is not None
        for standing in standings:
            show(standing)
        # What the command draws a moment later.
        assert console._live_stack
        drawn = console.render_lines(console._live_stack[-1].get_renderable(), pad=False)
    assert shower() is None
    return ["".join(segment.text for segment in line).strip() for line in drawn]


def test_loading_when_data_is_prepared_then_the_bar_is_below_its_line_and_goes_with_it():
    line, bar = lines_while(Standing("preparing a[b].jsonl", 10, 100, 5), Standing("preparing a[b].jsonl", 20, 100, 10))
    assert line.endswith("loading the backbone and the data")
    assert bar.startswith("preparing a[b].jsonl ━") and " 10 rows" in bar
    _, bar = lines_while(Standing("preparing a.jsonl", 10, 100, 5), Standing("preparing b.jsonl", 20, None, 7))
    assert bar.startswith("preparing b.jsonl ━") and " 7 rows" in bar
    (line,) = lines_while(Standing("preparing a.jsonl", 10, 100, 5), None)
    assert line.endswith("loading the backbone and the data")


class Log(io.StringIO):
    """Signals when something has been written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.has_line = threading.Event()

    def flush(self) -> None:
        super().flush()
        if self.getvalue():
            self.has_line.set()


def test_loading_when_a_log_gets_no_line_for_a_while_then_the_reason_is_written(monkeypatch):
    monkeypatch.setattr("weft.cli.watch.QUIET_S", 0.0)
    log = Log()
    with loading(Console(file=log, width=80)):
        assert log.has_line.wait(60)
    assert log.getvalue() == "loading the backbone and the data\n"


def test_loading_when_a_log_is_quick_then_only_data_may_write_to_it(monkeypatch):
    monkeypatch.setattr("weft.cli.watch.QUIET_S", 3600.0)
    log = Log()
    with loading(Console(file=log)):
        assert shower() is None, "data that takes long writes lines of its own"
    assert log.getvalue() == ""
