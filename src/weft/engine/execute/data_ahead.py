"""Prepares the data of jobs in another process while this one imports its libraries and loads its model.

The prepared data is in the cache when it is loaded. An error in a job's data is raised where that data is waited for,
with the same message as without the process. Any other failure costs only the head start, not the run. Progress is
shown by this process, because only one process may draw on a terminal.
"""

from __future__ import annotations

import datetime
import os
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from weft.data.load import find_sources, load_job_data
from weft.data.prepared.cache import default_cache
from weft.data.prepared.key import tokenizer_identity
from weft.data.prepared.prepare import Standing, shower, shown_by
from weft.data.prepared.workers import do_without_torch
from weft.errors import ConfigError, DataError, WeftError
from weft.model.source import load_tokenizer
from weft.processes import ChildProgram
from weft.spec import JobSpec

WORTH_BYTES = 2**20
"""Number of bytes of text from which a process that prepares them is worth its start."""


class Request(NamedTuple):
    base_model: str
    jobs: tuple[JobSpec, ...]
    base_dir: Path
    clock: datetime.datetime
    is_shown: bool
    """True if it sends progress; else it writes lines to standard error."""


class DataAhead:
    def __init__(self, request: Request) -> None:
        self._program = ChildProgram(__name__)
        self._found: dict[str, WeftError | None] = {}
        self._is_over = False
        self._news = threading.Condition()
        self._show = shower()
        with suppress(OSError):  # it has already ended
            self._program.connection.send(request)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def wait(self, job: str) -> None:
        """Waits until a job's data is prepared or the process has ended; raises an error in the data."""
        with self._news:
            self._news.wait_for(lambda: self._is_over or job in self._found)
        if (found := self._found.get(job)) is not None:
            raise found

    def wait_for_all(self) -> None:
        """Waits until all data is prepared; errors appear when it is loaded."""
        with self._news:
            self._news.wait_for(lambda: self._is_over)

    def close(self) -> None:
        self._program.kill()
        self._listener.join()
        self._program.close()

    def _listen(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                news = self._program.connection.recv()
                if self._show is not None and (news is None or isinstance(news, Standing)):
                    self._show(news)
                    continue
                with self._news:
                    self._found[news[0]] = news[1]
                    self._news.notify_all()
        with self._news:
            self._is_over = True
            self._news.notify_all()


def prepare_ahead(
    base_model: str, jobs: Sequence[JobSpec], base_dir: Path, clock: datetime.datetime
) -> DataAhead | None:
    """Starts to prepare the data of jobs; None where that is not worth a process or nothing would be cached."""
    try:
        if default_cache() is None or _num_bytes(jobs, base_dir) < WORTH_BYTES:
            return None
        return DataAhead(Request(base_model, tuple(jobs), base_dir, clock, shower() is not None))
    except (WeftError, OSError):  # loading the data will report it
        return None


def _num_bytes(jobs: Sequence[JobSpec], base_dir: Path) -> int:
    files = {file.path: file for job in jobs for source in find_sources(job, base_dir) for file in source.files}
    return sum(file.num_text_bytes for file in files.values())


def main(connection: Connection[Any, Any]) -> None:
    """Prepares the data of one job after another, and ends with its parent."""
    do_without_torch()
    try:
        request: Request = connection.recv()
        threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
        tokenizer = load_tokenizer(request.base_model)
        if tokenizer_identity(tokenizer) is None:
            return  # its rows cannot be cached
        with ExitStack() as stack:
            if request.is_shown:
                stack.enter_context(shown_by(connection.send))
            for job in request.jobs:
                connection.send((job.name, _error_of(job, tokenizer, request)))
    except Exception:  # user code on user files; the run will report it
        return


def _error_of(job: JobSpec, tokenizer: Any, request: Request) -> WeftError | None:
    """Prepares the data of a job; its error, if the data or its settings are wrong."""
    try:
        load_job_data(job, tokenizer, request.base_dir, clock=request.clock)
    except WeftError as error:
        return error if isinstance(error, DataError | ConfigError) else None
    return None


def _end_with(connection: Connection[Any, Any]) -> None:
    with suppress(EOFError, OSError):
        connection.recv()
    os._exit(1)
