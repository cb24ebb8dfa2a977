"""Processes that convert chunks of rows in parallel; results come in the order of the chunks.

Each has a chunk in work and another one waiting, which a thread of its own reads: so a process never waits for one that
waits, and memory holds a few chunks for each process.
"""

from __future__ import annotations

import gc
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from weft.data.prepared.convert import ConvertedChunk, Converter
from weft.data.rows.chunks import Chunk
from weft.data.tokens.without_torch import do_without_torch
from weft.errors import WeftError
from weft.processes import ChildProgram

IN_MEMORY = 2
"""Chunks of a process: one in work, and the next."""


class Worker:
    """One process and its connection."""

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
        """Waits for a result; an error in a row is raised here."""
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
    """Processes that convert for one converter."""

    def __init__(self, converter: Converter, number: int) -> None:
        self._workers = [Worker(converter) for _ in range(number)]

    def convert(self, chunks: Iterable[Chunk], objective: str, first_format: str) -> Iterator[ConvertedChunk]:
        """The result of each chunk of a source, in order."""
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
    """Converts chunks until the other side is gone."""
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
