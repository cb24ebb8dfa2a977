"""Processes that convert chunks of rows in parallel; results come in the order of the chunks.

Each has a chunk in work and another one waiting, which a thread of its own reads: so a process never waits for one that
waits, and memory holds a few chunks for each process.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, Protocol

from weft.data.json_rows import read_lines, rows_of_lines
from weft.data.prepared.convert import ConvertedChunk, Converter
from weft.data.row import Row
from weft.data.sources import DataFile, Source
from weft.errors import WeftError
from weft.processes import ChildProgram

IN_MEMORY = 2
"""Chunks of a process: one in work, and the next."""


class Worker:
    def __init__(self, converter: Converter) -> None:
        # One thread each: there are as many processes as cores.
        self._program = ChildProgram(__name__, {"TOKENIZERS_PARALLELISM": "false"})
        self._program.connection.send(converter)

    def send(self, *task: Any) -> None:
        try:
            self._program.connection.send(task)
        except OSError:
            raise self._death() from None

    def receive(self) -> ConvertedChunk:
        try:
            result = self._program.connection.recv()
        except (EOFError, OSError):
            raise self._death() from None
        if isinstance(result, Exception):
            raise result
        assert isinstance(result, ConvertedChunk)
        return result

    def close(self) -> None:
        self._program.close()

    def _death(self) -> WeftError:
        code = self._program.wait()
        how = f"by signal {-code}" if code < 0 else f"with code {code}"
        return WeftError(
            f"a process that prepares data ended {how}.",
            hint="It may have run out of memory.",
        )


class Workers:
    def __init__(self, converter: Converter, number: int) -> None:
        self._workers = [Worker(converter) for _ in range(number)]

    def convert(self, chunks: Iterable[Chunk], objective: str, first_format: str) -> Iterator[ConvertedChunk]:
        idle, busy = deque(self._workers * IN_MEMORY), deque[Worker]()
        reading, later = iter(chunks), None
        while True:
            try:
                chunk = next(reading)
            except StopIteration:
                break
            except WeftError as error:
                # What is wrong with a chunk before it comes first.
                later = error
                break
            done = None
            if not idle:
                idle.append(busy.popleft())
                done = idle[0].receive()
            worker = idle.popleft()
            worker.send(chunk, objective, first_format)
            busy.append(worker)
            if done is not None:
                yield done
        for worker in busy:
            yield worker.receive()
        if later is not None:
            raise later

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


def main(connection: Connection[Any, Any]) -> None:
    do_without_torch()
    try:
        converter: Converter = connection.recv()
        # What is there by now stays: the garbage collector need not look at it again and again.
        gc.freeze()
        tasks: SimpleQueue[tuple[Chunk, str, str] | None] = SimpleQueue()
        threading.Thread(target=_take_in, args=(connection, tasks), daemon=True).start()
        while (task := tasks.get()) is not None:
            connection.send(_converted(converter, *task))
    except (EOFError, OSError):
        return


def _take_in(connection: Connection[Any, Any], tasks: SimpleQueue[tuple[Chunk, str, str] | None]) -> None:
    """Reads tasks as soon as they come; None is the end."""
    try:
        while True:
            tasks.put(connection.recv())
    except (EOFError, OSError):
        tasks.put(None)


def _converted(
    converter: Converter, chunk: Chunk, objective: str, first_format: str
) -> ConvertedChunk | WeftError | MemoryError:
    try:
        return converter.convert(chunk.rows(), objective=objective, first_format=first_format)
    except (WeftError, MemoryError) as error:
        return error


ROWS_PER_CHUNK = 1024


class Chunk(Protocol):
    @property
    def num_bytes(self) -> int: ...

    def rows(self) -> list[Row]:
        """The rows; one that cannot be read is a DataError."""
        ...


@dataclass(frozen=True)
class RowChunk:
    read: list[Row]
    num_bytes: int = 0

    def rows(self) -> list[Row]:
        return self.read


@dataclass(frozen=True)
class LineChunk:
    lines: list[bytes]
    name: str
    first_number: int

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.lines))

    @property
    def num_rows(self) -> int:
        return sum(1 for line in self.lines if line.strip())

    def first_rows(self, number: int) -> LineChunk:
        ends = itertools.accumulate(bool(line.strip()) for line in self.lines)
        return replace(self, lines=[line for line, end in zip(self.lines, ends, strict=True) if end <= number])

    def rows(self) -> list[Row]:
        return list(rows_of_lines(self.lines, self.name, self.first_number))


def chunks_of(source: Source) -> Iterator[Chunk]:
    if source.is_lines:
        yield from line_chunks(source)
        return
    rows = source.rows()
    while read := list(itertools.islice(rows, ROWS_PER_CHUNK)):
        yield RowChunk(read)


def line_chunks(source: Source) -> Iterator[LineChunk]:
    """All chunks of a source of line files, up to its `max_rows`."""
    left = source.max_rows
    for file in source.files:
        for chunk in _file_chunks(file):
            if left is None:
                yield chunk
                continue
            some = chunk.first_rows(left)
            left -= some.num_rows
            yield some
            if not left:
                return


def _file_chunks(file: DataFile) -> Iterator[LineChunk]:
    number = 1
    with file.read_errors():
        lines = read_lines(file.path)
        while some := list(itertools.islice(lines, ROWS_PER_CHUNK)):
            yield LineChunk(some, file.name, number)
            number += len(some)


def do_without_torch() -> None:
    """Makes torch count as not installed in this process; for programs that are started for data alone."""
    modules: dict[str, Any] = sys.modules
    modules.setdefault("torch", None)
    # transformers would advise to install it.
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
