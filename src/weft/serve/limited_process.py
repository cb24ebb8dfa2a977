"""Runs functions in a process of its own with limits of time and memory, so that they cannot harm the caller.

A tenant's file may take long to read, or more memory than there is. Its process then ends, the file is refused with the
reason in a sentence, and those of other tenants are read on.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from weft.errors import DataError
from weft.processes import ChildProgram, end_with_parent

T = TypeVar("T")


@dataclass(frozen=True)
class FileLimits:
    seconds: float = 600.0
    memory_bytes: int = 4 * 2**30
    """The most memory besides that of the process itself."""


class LimitedProcess:
    """One process for one thread; it is started when it is first needed, and again after it has died."""

    def __init__(self, limits: FileLimits) -> None:
        self._limits = limits
        self._program: ChildProgram | None = None

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Returns what a function returns or raises what it raises; a DataError names the limit that it passed."""
        try:
            connection = self._connected()
            connection.send((function, arguments))
            if not connection.poll(self._limits.seconds):
                raise DataError(f"took more than the {self._limits.seconds:g} s that a file may take to be read.")
            is_good, found = connection.recv()
        except (EOFError, OSError):
            self.close()
            cause = f"it may have needed more than {_size(self._limits.memory_bytes)} of memory"
            raise DataError(f"could not be read: its process ended; {cause}.") from None
        except BaseException:
            self.close()
            raise
        if is_good:
            return found  # type: ignore[no-any-return]
        raise found

    def close(self) -> None:
        if self._program is not None:
            self._program.close()
        self._program = None

    def _connected(self) -> Connection:
        if self._program is None:
            # Never a fork: other threads of this process hold locks, and perhaps a GPU.
            self._program = ChildProgram(__name__)
            self._program.connection.send(self._limits.memory_bytes)
        return self._program.connection


def main(connection: Connection) -> None:
    """Runs one function after another until the other side is gone."""
    # A function may take long after that; the end of the process that started this one is also the end of this one.
    end_with_parent(os.getppid())
    with contextlib.suppress(EOFError, OSError):
        memory_bytes: int = connection.recv()
        while True:
            function, arguments = connection.recv()
            connection.send(_outcome(function, arguments, memory_bytes))


def _outcome(function: Callable[..., Any], arguments: tuple[Any, ...], memory_bytes: int) -> tuple[bool, Any]:
    try:
        with _memory_limit(memory_bytes):
            return True, function(*arguments)
    except MemoryError:
        return False, DataError(f"needs more than the {_size(memory_bytes)} of memory that a file may take.")
    except Exception as error:
        return False, error


@contextlib.contextmanager
def _memory_limit(num_bytes: int) -> Iterator[None]:
    """Limits what this process takes from now on; only Linux knows how much it has by now."""
    if sys.platform != "linux":
        yield
        return
    import resource

    has = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (has + num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"
