"""Follows a run as it trains: the loading line, the live table, the trackers, Ctrl-C, and restarts after a loss."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console, Group

from weft.data.prepared.prepare import QUIET_S, Bar, Standing, shown_by
from weft.errors import MissingExtraError, StorageError
from weft.report import readable
from weft.report.live import LiveTable, summary_table
from weft.report.page import ReportExtra, write_report
from weft.report.read_run import read_run
from weft.report.run_data import JobReport
from weft.report.trackers import open_trackers
from weft.store.wall_clock import TimeSplit, WallClock

if TYPE_CHECKING:
    from weft.engine.events import Event
    from weft.engine.run_engine import RunJob
    from weft.engine.train import PreparedRun
    from weft.job_state import JobState
    from weft.store.run_dir import RunDirectory


class StopRequest:
    """True once the user or the system has requested a stop; the second request is a plain interrupt."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.is_set = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _leave_terminal()
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True
        again = "press Ctrl-C again to stop" if number == signal.SIGINT else "a second signal stops"
        with suppress(RuntimeError):
            # It may have come while a line was being written: then this one goes out with the next.
            self._console.print(f"stopping after the current work; {again} at once")


@contextmanager
def stop_signals(request: StopRequest) -> Iterator[None]:
    """Ctrl-C, a plain kill and a terminal that is closed request a stop while the block runs."""
    handled = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        # nohup ignores it.
        handled.append(signal.SIGHUP)
    before = {number: signal.signal(number, request) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave_terminal() -> None:
    """Discards further output: the terminal is gone, and writing to it would raise."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        if os.isatty(descriptor):
            os.dup2(nowhere, descriptor)
    os.close(nowhere)


def follow(
    run: PreparedRun, directory: RunDirectory, console: Console, location: object = None
) -> tuple[dict[str, JobState], bool]:
    """Trains a prepared run while showing it; returns the final state of each job and whether the user stopped it.
    `location`: the run's directory or URL as the user knows it, if it is not `directory`."""
    from weft.engine.events import JobSucceeded
    from weft.engine.train import execute_run

    jobs = [(job.spec.name, job.num_steps) for job in run.engine.jobs.values()]
    name = run.spec.run_name or directory.path.resolve().name

    def warn(message: str) -> None:
        readable.print_line(console, f"warning: {message}", "yellow")

    stop = StopRequest(console)
    trackers = open_trackers(run.spec.report_to, directory.path, name, warn=warn)
    with LiveTable(console, jobs) as table, stop_signals(stop):

        def on_event(event: Event) -> None:
            trackers.record(event)
            if isinstance(event, JobSucceeded) and event.adapter_dir is not None and location is not None:
                event = replace(event, adapter_dir=event.adapter_dir.replace(str(directory.path), str(location)))
            table.update(event)

        try:
            states = execute_run(run, directory, on_event=on_event, should_stop=lambda: stop.is_set)
        finally:
            trackers.close()
    return states, stop.is_set


def conclude(
    directory: Path,
    console: Console,
    extra: ReportExtra | None = None,
    live: Mapping[str, RunJob] = MappingProxyType({}),
    location: object = None,
    time: Callable[[], TimeSplit] | None = None,
) -> None:
    """Prints the results of a run and writes report.html. `live`: jobs of this process, whose state counts where their
    files could not be written. `location`: the run's directory or URL as the user knows it, if it is not
    `directory`."""
    location = location or directory
    run = read_run(directory)
    console.print(summary_table([_as_known(job, live.get(job.name)) for job in run.jobs]))
    console.print()
    if run.memory_in_words is not None:
        readable.print_line(console, f"memory    {' '.join(run.memory_in_words)}")
    if (steps := readable.dispatched(run)) is not None:
        readable.print_line(console, f"dispatch  {steps}")
    try:
        page = write_report(directory, extra=extra, time=time)
        readable.print_line(console, f"report    {location}/{page.name}")
    except MissingExtraError as error:
        readable.print_line(console, f"no report: {error}", "yellow")
    if any(directory.glob("*/adapter")):
        readable.print_line(console, f"adapters  {location}/<job>/adapter/")


def record_time(wall: WallClock, directory: RunDirectory) -> TimeSplit:
    """Stops the clock and records the run's time over all commands, for its report and for a resume."""
    wall.stop()
    # A full disk is reported where a job's files cannot be written.
    with suppress(StorageError):
        directory.write_time(wall.of_run())
    return wall.of_run()


def print_time(wall: WallClock, console: Console) -> None:
    readable.print_line(console, f"time      {readable.time_split(wall.since_command())}")


def _as_known(report: JobReport, job: RunJob | None) -> JobReport:
    """A job's report with its state in this process, which may be newer than its files."""
    if job is None or report.state == job.state:
        return report
    reason = None if job.reason is None else str(job.reason)
    status = {"state": str(job.state), "reason": reason, "step": job.step, "trained_tokens": job.num_tokens}
    return replace(report, status={**report.status, **status})


@contextmanager
def loading(console: Console, what: str = "loading the backbone and the data") -> Iterator[None]:
    """Shows `what` while the block runs, and the progress of preparing data if that takes long."""
    if not console.is_terminal:
        with _printed_if_slow(console, what):
            yield
        return
    with console.status(what) as status:
        bar = Bar(console)

        def show(at: Standing | None) -> None:
            if at is None:
                status.update(what)
            else:
                bar.draw(at)
                status.update(Group(what, bar.progress))

        with shown_by(show):
            yield


@contextmanager
def _printed_if_slow(console: Console, what: str) -> Iterator[None]:
    timer = threading.Timer(QUIET_S, console.print, [what], {"highlight": False})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


RESTARTS = 3
"""Number of times all processes are started again."""
Ended = TypeVar("Ended")


def retry_on_replica_loss(
    attempt: Callable[[bool, WallClock, int], Ended], wall: WallClock, notify: Callable[[str], None]
) -> Ended:
    """Calls `attempt` again after the loss of a stage, with True, a clock that goes on from the last, and how often
    stages have run out of memory: until it refuses to take less."""
    from weft.parallel.stages.stage_pool import StageLostError
    from weft.parallel.stages.stage_process import StageMemoryError

    is_later, num_left, num_lessened = False, RESTARTS, 0
    while True:
        try:
            return attempt(is_later, wall, num_lessened)
        except StageMemoryError as error:
            num_lessened += 1
            notify(f"{error.where} ran out of memory. All stages start again, with less in flight.")
        except StageLostError as error:
            if num_left == 0:
                raise
            times = "once more" if num_left == 1 else f"{num_left} times"
            notify(f"{error.where}: {error.message} They start again, at most {times}.")
            num_left -= 1
        is_later, wall = True, wall.again()
