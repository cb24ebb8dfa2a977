"""Follows a run as it trains: it updates the live table and the trackers, and answers Ctrl-C."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING

from rich.console import Console

from weft.errors import MissingExtraError, StorageError
from weft.report import readable
from weft.report.live import LiveTable, summary_table
from weft.report.page import ReportExtra, write_report
from weft.report.read_run import read_run
from weft.report.run_data import JobReport
from weft.report.trackers import open_trackers
from weft.wall_clock import TimeSplit, WallClock

if TYPE_CHECKING:
    from weft.engine.events import Event
    from weft.engine.run_engine import RunJob
    from weft.engine.train import PreparedRun
    from weft.job_state import JobState
    from weft.store.run_dir import RunDirectory


class StopRequest:
    """True once the user or the system has asked the run to stop; the second time is a plain interrupt."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.is_set = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """What a signal calls."""
        if number == signal.SIGHUP:
            _leave_terminal()
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True
        again = "press Ctrl-C again to stop" if number == signal.SIGINT else "a second signal stops"
        with suppress(RuntimeError):
            # It may have come while a line was being written: then this one goes out with the next.
            self._console.print(f"stopping after what is under way; {again} at once")


@contextmanager
def stop_signals(request: StopRequest) -> Iterator[None]:
    """Ctrl-C, a plain kill and a terminal that is closed ask for a stop while the block runs."""
    heeded = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        # Under nohup it is ignored, and is to stay so.
        heeded.append(signal.SIGHUP)
    before = {number: signal.signal(number, request) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave_terminal() -> None:
    """Sends what is still printed nowhere: the terminal is gone, and writing to it would raise."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        if os.isatty(descriptor):
            os.dup2(nowhere, descriptor)
    os.close(nowhere)


def follow(
    run: PreparedRun, directory: RunDirectory, console: Console, place: object = None
) -> tuple[dict[str, JobState], bool]:
    """Trains a prepared run while showing it; returns how each job ended and whether the user stopped it.

    `place`: where its owner finds the run, if not in the directory.
    """
    from weft.engine.events import JobSucceeded
    from weft.engine.train import execute_run

    jobs = [(job.spec.name, job.num_steps) for job in run.engine.jobs.values()]
    name = run.spec.run_name or directory.path.resolve().name

    def warn(message: str) -> None:
        console.print(f"warning: {message}", style="yellow", markup=False, soft_wrap=True)

    stop = StopRequest(console)
    trackers = open_trackers(run.spec.report_to, directory.path, name, warn=warn)
    with LiveTable(console, jobs) as table, stop_signals(stop):

        def on_event(event: Event) -> None:
            trackers.record(event)
            if isinstance(event, JobSucceeded) and event.adapter_dir is not None and place is not None:
                event = replace(event, adapter_dir=event.adapter_dir.replace(str(directory.path), str(place)))
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
    place: object = None,
    time: Callable[[], TimeSplit] | None = None,
) -> None:
    """Writes report.html and says how it went and where everything is.

    `live`: jobs that this process knows; what it knows of them counts where their files could not be written. `place`:
    where its owner finds the run, if not in the directory.
    """
    place = place or directory
    jobs = [_as_known(job, live.get(job.name)) for job in read_run(directory).jobs]
    console.print(summary_table(jobs))
    console.print()
    try:
        page = write_report(directory, extra=extra, time=time)
        console.print(f"report    {place}/{page.name}", markup=False, soft_wrap=True)
    except MissingExtraError as error:
        console.print(f"no report: {error}", style="yellow", markup=False, soft_wrap=True)
    if any(directory.glob("*/adapter")):
        console.print(f"adapters  {place}/<job>/adapter/", markup=False, soft_wrap=True)


def settle(wall: WallClock, directory: RunDirectory) -> TimeSplit:
    """Stops the clock, and records what the run has taken over all sessions, for its report and for the next one."""
    wall.stop()
    # A disk that is full is told of where a job's files cannot be written.
    with suppress(StorageError):
        directory.write_time(wall.of_run())
    return wall.of_run()


def print_time(wall: WallClock, console: Console) -> None:
    """Says where the time went, from the command until now."""
    console.print(
        f"time      {readable.time_split(wall.since_command())}", markup=False, highlight=False, soft_wrap=True
    )


def _as_known(report: JobReport, job: RunJob | None) -> JobReport:
    """What the files say of a job, corrected by what the process knows."""
    if job is None or report.state == job.state:
        return report
    reason = None if job.reason is None else str(job.reason)
    status = {"state": str(job.state), "reason": reason, "step": job.step, "trained_tokens": job.num_tokens}
    return replace(report, status={**report.status, **status})
