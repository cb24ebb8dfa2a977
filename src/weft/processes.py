"""Child processes of this machine: forks that have torch and our code from their first moment, and fresh programs.

Forks are made by multiprocessing's fork server, which imports for all of them, once per command and beside the
command's own imports, and never touches a GPU. Each has a session and a log of its own. It ends when the other end of
its connection does, however its parent ended.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path

PRELOADED = (
    "weft.parallel.stages.stage_process",
    "weft.parallel.replicas.rank",
    "weft.cli.rank",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.tokenization_utils_tokenizers",
)
"""What stages and ranks import; transformers does so only when a model is loaded, and most models need the same."""
EXIT_CODE_S = 5.0
"""Seconds that the fork server has to report how a process ended."""
_SERVER_LOST = 255
"""The exit code that multiprocessing reports for processes whose server is gone."""
_PR_SET_NAME = 15
_PROGRAM = f"import sys; from {__name__} import run_program; run_program(*sys.argv[1:])"
_LOCK = threading.Lock()
"""multiprocessing reads the end of any child when it starts another."""


class ChildProcess:
    """A process that runs the `main` of a module, used like a `subprocess.Popen`.

    It starts in the background, so that the caller does not wait for the fork server's imports. Its end is seen on its
    pidfd, because multiprocessing takes all children for ended when the server is lost.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str] = (),
        connections: Sequence[Connection] = (),
        *,
        variables: Mapping[str, str],
        name: str,
        log: Path,
    ) -> None:
        """`arguments`: of its `sys.argv`; `connections`: what its `main` is called with, closed here once it has them.

        `variables`: its whole environment, though what libraries read at their import is the fork server's. `name`: its
        name in lists of processes, of which Linux keeps 15 letters; `log`: the file that it prints to.
        """
        self.returncode: int | None = None
        self._pid = 0
        self._end = -1
        """Readable once it has ended."""
        self._error: OSError | None = None
        self._is_unwanted = False
        self._has_begun = threading.Event()
        given = (module, arguments, connections, dict(variables), name, str(log))
        self._process = _context().Process(target=_run, args=given, name=name)
        threading.Thread(target=self._start, args=(connections,), name=f"start-{name}", daemon=True).start()

    @property
    def pid(self) -> int:
        """Its number, which is that of its session and its process group too."""
        self.wait_begun()
        return self._pid

    def wait_begun(self) -> None:
        """Waits until it runs; OSError if it cannot be started."""
        self._has_begun.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def poll(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None while it runs."""
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end; TimeoutExpired if that does not come in time."""
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self._pid), timeout or 0.0)
        return code

    def kill(self) -> None:
        """Ends it with all that it has started, at once; a process that does not run yet is ended when it begins."""
        self._is_unwanted = True
        if self._pid and self.returncode is None:
            try:
                os.killpg(self._pid, signal.SIGKILL)
            except ProcessLookupError:  # it has no group of its own yet, or is gone
                with suppress(ProcessLookupError):
                    os.kill(self._pid, signal.SIGKILL)

    def _start(self, connections: Sequence[Connection]) -> None:
        try:
            self._fork()
        except (EOFError, OSError) as error:
            self.returncode = -signal.SIGKILL
            self._error = error if isinstance(error, OSError) else OSError("the fork server ended")
        finally:
            for connection in connections:
                connection.close()
            self._has_begun.set()
        if self._is_unwanted:
            self.kill()

    def _fork(self) -> None:
        with _LOCK:
            prepare()
            try:
                self._process.start()
            except (EOFError, ConnectionError):  # the server is gone; a new one may fare better
                prepare()
                self._process.start()
        assert self._process.pid is not None
        self._end = self._process.sentinel
        if sys.platform == "linux":
            with suppress(OSError):  # it has ended already, or the system has no pidfd
                self._end = os.pidfd_open(self._process.pid)
                weakref.finalize(self, os.close, self._end)
        self._pid = self._process.pid
        # Before multiprocessing waits for it: what this process has started ends with it.
        atexit.register(self.kill)

    def _ended(self, longest_s: float | None) -> int | None:
        if self._is_unwanted and not self._has_begun.is_set():
            return -signal.SIGKILL
        self.wait_begun()
        if self.returncode is None and wait([self._end], longest_s):
            with _LOCK:
                if self.returncode is None:
                    self._process.join(EXIT_CODE_S)
                    code = self._process.exitcode
                    self.returncode = -signal.SIGKILL if code in (None, _SERVER_LOST) else code
                    atexit.unregister(self.kill)
        return self.returncode


class ChildProgram:
    """A Python of its own that runs the `main` of a module with a connection to this process.

    It has nothing that this process has imported, and does not run what this one was started with. Ctrl-C is for this
    process; the program ends when the connection does, which is its to notice.
    """

    def __init__(self, module: str, variables: Mapping[str, str] | None = None) -> None:
        """`variables`: of its environment, beside those of this process."""
        self.connection, theirs = multiprocessing.Pipe()
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-W", "ignore", "-c", _PROGRAM, module, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": paths, **(variables or {})},
            )

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    def wait(self) -> int:
        """Waits for its end; its exit code, or minus the signal that ended it."""
        return self._process.wait()

    def kill(self) -> None:
        """Ends it at once; what it has sent can still be read."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Ends it at once."""
        self.kill()
        self.connection.close()


def prepare() -> None:
    """Starts the fork server if none runs, and returns before its imports, which take seconds, are done."""
    if isinstance(_context(), ForkServerContext):
        # Ctrl-C is for this process. The server takes over what is blocked.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@functools.cache
def _context() -> ForkServerContext | SpawnContext:
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED])
    return context


def _run(
    module: str,
    arguments: Sequence[str],
    connections: Sequence[Connection],
    variables: Mapping[str, str],
    name: str,
    log: str,
) -> None:
    """What a new process does."""
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(out, stream)
    os.close(out)
    os.environ.clear()
    os.environ.update(variables)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
    sys.argv = [module, *arguments]
    importlib.import_module(module).main(*connections)


def run_program(module: str, descriptor: str) -> None:
    """What a new program does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    importlib.import_module(module).main(Connection(int(descriptor)))
