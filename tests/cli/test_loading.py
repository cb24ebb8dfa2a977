"""A command's own line and the bar of its data share a terminal."""

import io

from rich.console import Console

from weft.cli.loading import loading
from weft.data.prepared.progress import Standing, shower


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


def test_loading_when_there_is_no_terminal_then_lines_go_to_the_log():
    with loading(Console(file=io.StringIO())):
        assert shower() is None
