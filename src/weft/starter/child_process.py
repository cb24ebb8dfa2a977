"""A process that a starter was asked for, used like a `subprocess.Popen`.

The starter is its parent and learns how it ended, but that it ended is seen without one: if the starter is lost, its
processes live on, and whoever waits for them does so in vain no more than before. What a starter does not get to start
is started alone.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait

from weft.starter.order import ProcessOrder

START_S = 120.0
"""Seconds a starter has to import its libraries, perhaps over a network, and to fork."""
ASK_S = 5.0
"""Seconds it has to say how a process ended."""


class ForkedProcess:
    """A process that a starter has forked."""

    def __init__(self, pid: int, link: Connection) -> None:
        """`link` leads to the starter, which lets nobody else have the number before it is told that we know."""
        self.pid = pid
        self.returncode: int | None = None
        self._link = link
        self._asking = threading.Lock()
        self._end: int | None = None
        # Only if its starter was lost, too, it can be gone altogether.
        with suppress(ProcessLookupError):
            self._end = os.pidfd_open(pid)
            weakref.finalize(self, os.close, self._end)

    def poll(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None while it runs."""
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end; TimeoutExpired if that does not come in time."""
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return code

    def _ended(self, longest_s: float | None) -> int | None:
        if self.returncode is None and (self._end is None or wait([self._end], longest_s)):
            with self._asking:
                if self.returncode is None:
                    self.returncode = self._told_code()
                    self._link.close()
        return self.returncode

    def _told_code(self) -> int:
        """How it ended; where nobody is left who knows, it is taken for killed, as the one who would know was."""
        with suppress(EOFError, OSError):
            self._link.send(None)
            if self._link.poll(ASK_S):
                return int(self._link.recv())
        return -signal.SIGKILL


class UnwantedProcess:
    """A process that was ended before it was started, or could not be."""

    pid = 0
    returncode = -signal.SIGKILL

    def poll(self) -> int:
        """As of a process that was killed."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The same."""
        return self.returncode


class ChildProcess:
    """A process that is being started: whoever wants to know more of it waits until it runs."""

    def __init__(self, order: ProcessOrder, out: int, files: Sequence[int], link: Connection | None = None) -> None:
        """`link` leads to the starter that was asked for it; None: it is started alone."""
        self._order, self._link = order, link
        # Until it runs, it may have to be started alone.
        self._out, *self._files = (os.dup(file) for file in (out, *files))
        self._starting = threading.Lock()
        self._process: ForkedProcess | UnwantedProcess | subprocess.Popen[bytes] | None = None
        self._is_unwanted = False
        if link is None:
            self.wait_begun()

    @property
    def pid(self) -> int:
        """Its number; it is that of its session and its group, too."""
        return self.wait_begun().pid

    @property
    def returncode(self) -> int | None:
        """What `poll` or `wait` last returned."""
        return None if self._process is None else self._process.returncode

    def poll(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None while it runs."""
        return self.wait_begun().poll()

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end; TimeoutExpired if that does not come in time."""
        return self.wait_begun().wait(timeout)

    def kill(self) -> None:
        """Ends it with all that it has started, at once; also before it runs."""
        self._is_unwanted = True
        if self._link is not None and self._process is None:
            hang_up(self._link)
        pid = self.pid
        if pid:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def wait_begun(self) -> ForkedProcess | UnwantedProcess | subprocess.Popen[bytes]:
        """The process, when it runs; OSError if it cannot be started."""
        with self._starting:
            if self._process is None:
                try:
                    self._process = self._forked() or self._otherwise()
                except OSError:
                    self._process = UnwantedProcess()
                    raise
                finally:
                    for file in (self._out, *self._files):
                        os.close(file)
            return self._process

    def _forked(self) -> ForkedProcess | None:
        """The process as its starter made it; None if that is not to be had."""
        if self._link is None:
            return None
        with suppress(EOFError, OSError):
            if not self._link.poll(START_S):
                hang_up(self._link)
            return ForkedProcess(self._link.recv(), self._link)
        self._link.close()
        return None

    def _otherwise(self) -> UnwantedProcess | subprocess.Popen[bytes]:
        return UnwantedProcess() if self._is_unwanted else self._order.start_alone(self._out, self._files)


def hang_up(link: Connection) -> None:
    """Lets nobody say anything more on a link; a process that finds it so ends by itself."""
    with suppress(OSError), socket.socket(fileno=os.dup(link.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)
