import io
from pathlib import Path

import pytest
from made_events import eval_done, step_done
from rich.console import Console
from rich.text import Text

from weft.engine.events import (
    CheckpointSaved,
    JobCancelled,
    JobFailed,
    JobPaused,
    JobStarted,
    JobSucceeded,
    JobWarning,
    MicrobatchDone,
)
from weft.job_state import Reason, ReasonCode
from weft.report.live import LiveTable, summary_table
from weft.report.read_run import read_run
from weft.report.run_data import EvalPoint, JobReport


def pipe(encoding: str = "utf-8") -> tuple[Console, io.BytesIO]:
    raw = io.BytesIO()
    return Console(file=io.TextIOWrapper(raw, encoding=encoding, write_through=True)), raw


def screen(width: int = 120, height: int = 30) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=height, legacy_windows=False)


def shown(console: Console, table: LiveTable) -> list[str]:
    with console.capture() as capture:
        console.print(table.render())
    return Text.from_ansi(capture.get()).plain.splitlines()


def train(table: LiveTable, job: str, num_steps: int, until: int) -> None:
    table.update(JobStarted(job, 0, num_steps))
    for step in range(1, until + 1):
        table.update(step_done(job, step, num_steps=num_steps, loss=4.0 * 0.95**step, seconds=0.5 * step))


def test_live_table_when_piped_then_a_few_plain_lines_per_job() -> None:
    console, raw = pipe()
    with LiveTable(console, [("a", 200)]) as table:
        train(table, "a", 200, 200)
        table.update(eval_done("a", 200, 0.5))
        table.update(CheckpointSaved("a", 200))
        table.update(JobSucceeded("a", 200, "runs/x/a/adapter"))
    lines = raw.getvalue().decode().splitlines()
    assert lines[0] == "a: started, 200 steps"
    assert lines[1] == "a: step 20/200 (10 %), loss 1.4339, 200 tokens/s, 1:30 left"
    assert lines[-1] == "a: succeeded after 200 steps, loss 1.40e-04, eval loss 0.5000, adapter in runs/x/a/adapter"
    assert len(lines) == 11
    assert "\x1b" not in raw.getvalue().decode()


def test_live_table_when_piped_then_warnings_and_failures_are_always_reported() -> None:
    console, raw = pipe()
    with LiveTable(console, [("a", 10), ("b", 10)]) as table:
        table.update(JobWarning(("a",), "3 samples were cut"))
        table.update(JobWarning(("a", "b"), "smaller microbatches"))
        table.update(JobWarning((), "the disk is nearly full"))
        table.update(JobFailed("b", 0, Reason(ReasonCode.DIVERGED, "the loss is not finite")))
        table.update(JobPaused("a", 0, Reason(ReasonCode.RUN_STOPPED, "requested")))
        table.update(JobCancelled("a", 0))
    assert raw.getvalue().decode().splitlines() == [
        "warning: a: 3 samples were cut",
        "warning: a, b: smaller microbatches",
        "warning: the disk is nearly full",
        "b: failed: the loss is not finite",
        "a: paused at step 0 (requested)",
        "a: cancelled at step 0",
    ]


def test_live_table_when_a_job_goes_on_and_stops_early_then_the_log_reports_it() -> None:
    console, raw = pipe()
    with LiveTable(console, [("a", 10)]) as table:
        table.update(JobStarted("a", 4, 10))
        table.update(JobSucceeded("a", 4, None, early_stopped=True))
    assert raw.getvalue().decode().splitlines() == [
        "a: started at step 4, 10 steps",
        "a: succeeded after 4 steps (stopped early), loss –",
    ]


def test_live_table_when_text_holds_control_codes_or_markup_then_it_stays_text() -> None:
    console, raw = pipe("ascii")
    with LiveTable(console, [("a", 10)]) as table:
        table.update(JobFailed("a", 0, Reason(ReasonCode.ERROR, "line\x1b[2J one\r\ntwo [bold]é[/bold]")))
    assert raw.getvalue().decode("ascii").strip() == "a: failed: line [2J one two [bold]\\xe9[/bold]"


def test_live_table_when_on_a_terminal_then_a_row_per_job_and_totals() -> None:
    console = screen()
    now = 0.0
    table = LiveTable(console, [("a", 40), ("b", 40)], clock=lambda: now)
    now = 65.0
    train(table, "a", 40, 20)
    table.update(eval_done("a", 20, 1.5))
    table.update(MicrobatchDone(("a",), 90, 100, 0.1))
    header, first, second, _, totals = shown(console, table)
    assert header.split() == ["job", "state", "step", "loss", "eval", "loss", "lr", "tokens/s", "ETA"]
    words = first.split()
    assert words[:2] == ["a", "running"]
    assert words[3:] == ["20/40", "1.4339", "↓", "1.5000", "2e-4", "200", "0:10"]
    assert second.split()[1] == "queued"
    assert totals == "200 tokens/s · 90 % of the rows hold tokens · 1:05 elapsed · 1 running · 1 queued"


def test_live_table_when_the_terminal_is_narrow_then_every_line_fits() -> None:
    console = screen(width=80)
    table = LiveTable(console, [("a-job-with-quite-a-long-name-indeed", 12_000)])
    train(table, "a-job-with-quite-a-long-name-indeed", 12_000, 20)
    lines = shown(console, table)
    assert max(len(line) for line in lines) <= 80
    assert "20/12000" in lines[1]
    head, _, tail = lines[1].split()[0].partition("…")
    assert tail and "a-job-with-quite".startswith(head) and "a-long-name-indeed".endswith(tail)


def test_live_table_when_jobs_outnumber_lines_then_those_at_work_are_shown_and_the_rest_counted() -> None:
    console = screen(height=16)
    jobs = [(f"job-{i}", 10) for i in range(40)]
    table = LiveTable(console, jobs)
    table.update(JobSucceeded("job-0", 10, None))
    table.update(JobStarted("job-37", 0, 10))
    lines = shown(console, table)
    assert len(lines) < 16
    assert not any(line.startswith("job-0 ") for line in lines)
    assert any(line.startswith("job-37") for line in lines)
    assert "  … and 31 more jobs" in lines


def test_live_table_when_a_loss_is_nan_then_it_shows_nan() -> None:
    console = screen()
    table = LiveTable(console, [("a", 10)])
    table.update(step_done("a", 1, num_steps=10, loss=float("nan")))
    assert "nan" in shown(console, table)[1]


def test_live_table_when_the_block_ends_by_an_error_then_the_screen_is_restored() -> None:
    console = screen()
    with pytest.raises(KeyboardInterrupt), LiveTable(console, [("a", 10)]):
        raise KeyboardInterrupt
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().rstrip("\r\n").endswith(("\x1b[?25h", "\x1b[2K"))
    assert "\x1b[?25h" in console.file.getvalue()


def test_summary_table_then_one_row_per_job_with_its_remarks(run_dir: Path) -> None:
    console = Console(file=io.StringIO(), width=140)
    console.print(summary_table(read_run(run_dir).jobs))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 6
    assert lines[1].split()[:3] == ["reverse-words", "succeeded", "180"]
    assert "the loss was not finite for 3 steps in a row" in lines[4]


def test_summary_table_when_a_name_is_too_long_then_its_ends_are_shown_on_one_line() -> None:
    """Jobs of one family differ at the ends of their names, and numbers stay whole."""
    console = Console(file=io.StringIO(), width=70)
    console.print(summary_table([JobReport(f"support-desk-{'x' * 40}-rank-{r}", {}, {"step": 12345}) for r in (8, 16)]))
    assert isinstance(console.file, io.StringIO)
    _, first, second = console.file.getvalue().splitlines()
    assert first.startswith("support") and "-rank-8 " in first and " 12345 " in first
    assert second.startswith("support") and "-rank-16 " in second


def test_summary_table_when_objectives_measure_more_then_a_column_shows_it() -> None:
    console = Console(file=io.StringIO(), width=120)
    point = EvalPoint(
        3, None, 0.5, None, {"rewards/margins": 1.25, "rewards/accuracies": 0.9375, "rewards/chosen": 7.0}
    )
    console.print(summary_table([JobReport("pairs", {}, {}, (), (point,)), JobReport("plain", {}, {})]))
    assert isinstance(console.file, io.StringIO)
    header, pairs, plain = console.file.getvalue().splitlines()
    assert header.rstrip().endswith("measured") and pairs.rstrip().endswith("accuracies 93.8 %, margins 1.2500")
    assert plain.split()[-1] == "–"


def test_summary_table_when_nothing_is_known_then_it_still_prints() -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(summary_table([JobReport("lost", {}, {})]))
    assert isinstance(console.file, io.StringIO)
    assert "unknown" in console.file.getvalue()
