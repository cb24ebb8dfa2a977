"""Has another process prepare the data of jobs while this one imports its libraries and loads its model.

What it prepares, whoever loads the data finds in the cache. What it finds wrong with a job's data is raised where that
is waited for, in the words of whoever would have found it here. Whatever else goes wrong there costs the head start,
not the run. How far it has come is shown on this side, because one terminal is drawn on by one process.
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
from weft.data.prepared.progress import Standing, shower, shown_by
from weft.data.tokens.without_torch import do_without_torch
from weft.errors import ConfigError, DataError, WeftError
from weft.model.source import load_tokenizer
from weft.processes import ChildProgram
from weft.spec import JobSpec

WORTH_BYTES = 2**20
"""Less text is prepared in less time than a process needs to start."""


class Request(NamedTuple):
    """Whose data is to be prepared, and for which backbone."""

    base_model: str
    jobs: tuple[JobSpec, ...]
    base_dir: Path
    clock: datetime.datetime
    """What time it is for chat templates."""
    is_shown: bool
    """Whether it is to tell how far it has come; else it writes lines to standard error."""


class DataAhead:
    """The data of jobs, in preparation."""

    def __init__(self, request: Request) -> None:
        self._program = ChildProgram(__name__)
        self._found: dict[str, WeftError | None] = {}
        self._is_over = False
        self._news = threading.Condition()
        self._show = shower()
        with suppress(OSError):  # it has ended already
            self._program.connection.send(request)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def wait(self, job: str) -> None:
        """Waits until a job's data is prepared, or will not be; raises what is wrong with it."""
        with self._news:
            self._news.wait_for(lambda: self._is_over or job in self._found)
        if (found := self._found.get(job)) is not None:
            raise found

    def wait_for_all(self) -> None:
        """Waits until all data is prepared; what is wrong with any, whoever loads it finds."""
        with self._news:
            self._news.wait_for(lambda: self._is_over)

    def close(self) -> None:
        """Ends the process, whatever it is at."""
        self._program.kill()
        self._listener.join()
        self._program.close()

    def _listen(self) -> None:
        """Takes in what is found of jobs, and shows how far it has come, until the process ends."""
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
    """Begins to prepare the data of jobs; None where that is not worth a process, or nothing would be kept."""
    try:
        if default_cache() is None or _num_bytes(jobs, base_dir) < WORTH_BYTES:
            return None
        return DataAhead(Request(base_model, tuple(jobs), base_dir, clock, shower() is not None))
    except (WeftError, OSError):  # whatever is wrong with the data, loading it says that in its time
        return None


def _num_bytes(jobs: Sequence[JobSpec], base_dir: Path) -> int:
    """Text in the files of jobs; those of several are prepared once."""
    files = {file.path: file for job in jobs for source in find_sources(job, base_dir) for file in source.files}
    return sum(file.num_text_bytes for file in files.values())


def main(connection: Connection[Any, Any]) -> None:
    """Prepares the data of one job after the other, and ends when whoever asked for it does."""
    do_without_torch()
    try:
        request: Request = connection.recv()
        threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
        tokenizer = load_tokenizer(request.base_model)
        if tokenizer_identity(tokenizer) is None:
            return  # what it makes of rows cannot be kept
        with ExitStack() as stack:
            if request.is_shown:
                stack.enter_context(shown_by(connection.send))
            for job in request.jobs:
                connection.send((job.name, _error_of(job, tokenizer, request)))
    except Exception:  # other people's code on other people's files; the run has more to say of it
        return


def _error_of(job: JobSpec, tokenizer: Any, request: Request) -> WeftError | None:
    """Prepares the data of a job; what is wrong with it, where that is the data or how it is to be read."""
    try:
        load_job_data(job, tokenizer, request.base_dir, clock=request.clock)
    except WeftError as error:
        return error if isinstance(error, DataError | ConfigError) else None
    return None


def _end_with(connection: Connection[Any, Any]) -> None:
    """Waits until the other side is gone."""
    with suppress(EOFError, OSError):
        connection.recv()
    os._exit(1)
