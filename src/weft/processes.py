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

from weft.errors import ConfigError, counted

PRELOADED = (
    "weft.parallel.stages.stage_process",
    "weft.parallel.replicas.rank",
    "weft.cli.service.rank",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.tokenization_utils_tokenizers",
)
"""Imports of stages and ranks; transformers is otherwise imported when a model is loaded."""
EXIT_CODE_S = 5.0
"""Seconds that the fork server has to report how a process ended."""
_SERVER_LOST = 255
"""Exit code that multiprocessing reports for processes whose server is gone."""
_PR_SET_NAME, _PR_SET_PDEATHSIG = 15, 1
_PROGRAM = f"import sys; from {__name__} import run_program; run_program(*sys.argv[1:])"
_LOCK = threading.Lock()
"""multiprocessing reads the end of any child when it starts another."""


class ChildProcess:
    """A process that runs the `main` of a module, used like a `subprocess.Popen`. It starts in the background, so that
    the caller does not wait for the fork server's imports. Its end is seen on its pidfd, because multiprocessing takes
    all children for ended when the server is lost."""

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
        """`arguments`: its `sys.argv`; `connections`: arguments of its `main`, closed here once they are sent.
        `variables`: its whole environment, though libraries read the fork server's at their import. `name`: its name in
        process lists, of which Linux keeps 15 letters; `log`: its output file."""
        self.returncode: int | None = None
        self._pid = 0
        self._end = -1
        """File descriptor that is readable once the process has ended."""
        self._error: OSError | None = None
        self._is_unwanted = False
        self._has_begun = threading.Event()
        given = (module, arguments, connections, dict(variables), name, str(log))
        self._process = _context().Process(target=_run, args=given, name=name)
        threading.Thread(target=self._start, args=(connections,), name=f"start-{name}", daemon=True).start()

    @property
    def pid(self) -> int:
        """Process ID, also of its session and its process group."""
        self.wait_begun()
        return self._pid

    def wait_begun(self) -> None:
        """Waits until it runs; OSError if it cannot be started."""
        self._has_begun.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def poll(self) -> int | None:
        """Exit code, or minus the signal that ended it; None while it runs."""
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end; TimeoutExpired after `timeout` seconds."""
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self._pid), timeout or 0.0)
        return code

    def kill(self) -> None:
        """Kills it with its whole process group; a process that has not started yet ends when it starts."""
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
    """A new Python that runs the `main` of a module with a connection to this process. It has none of this process's
    imports or arguments. Ctrl-C does not reach it; it should end when the connection closes."""

    def __init__(self, module: str, variables: Mapping[str, str] | None = None) -> None:
        """`variables`: additions to this process's environment."""
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
        return self._process.pid

    def wait(self) -> int:
        """Waits for its end and returns the exit code, or minus the signal that ended it."""
        return self._process.wait()

    def kill(self) -> None:
        """Ends it at once; data that it has sent can still be read."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        self.connection.close()


def prepare() -> None:
    """Starts the fork server if none runs, and returns before its imports, which take seconds, are done."""
    if isinstance(_context(), ForkServerContext):
        # Ctrl-C is for this process; the server inherits blocked signals.
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    importlib.import_module(module).main(Connection(int(descriptor)))


MOST_PROCESSES = 1024
"""Maximum number of replicas, of workers or of a layout's devices."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Variable with the GPUs that CUDA shows to a process."""
AUTO = "auto"


def end_with_parent(parent: int) -> None:
    """Ends this process when the one that started it ends; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def last_line(log: Path) -> str:
    """The last line that a process wrote to its log; empty if there is none."""
    with suppress(OSError):
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip() if lines else ""
    return ""


def visible_gpus() -> list[str]:
    """GPUs that this process may use: those of its environment, or all with device files."""
    named = os.environ.get(VISIBLE)
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip() not in ("", "-1")]
    files = [path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal()]
    return [str(index) for index in range(len(files))]


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


IDLE_SHARE = 0.05
"""Largest share of its memory that the driver itself takes of an idle GPU."""


def are_idle(gpus: Sequence[str]) -> bool:
    """True if no process uses memory of these GPUs; torch would have to take some of each to find out."""
    try:
        driver = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    found = [driver.nvmlInit_v2() == 0]
    for name in gpus:
        gpu, memory = ctypes.c_void_p(), _Memory()
        if name.isdecimal():
            driver.nvmlDeviceGetHandleByIndex_v2(int(name), ctypes.byref(gpu))
        else:
            driver.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(gpu))
        is_known = gpu.value is not None and driver.nvmlDeviceGetMemoryInfo(gpu, ctypes.byref(memory)) == 0
        found.append(is_known and memory.used < IDLE_SHARE * memory.total)
    driver.nvmlShutdown()
    return all(found)


def choose_gpus(devices: str | None, visible: list[str]) -> list[str]:
    """GPUs of a list such as `0,2`, as indices of the visible ones; all if there is no list."""
    if devices is None:
        return visible
    if not visible:
        raise ConfigError("are for GPUs, and there is none.", where="--devices")
    indices = [part.strip() for part in devices.split(",")]
    for part in indices:
        if (number := read_count(part)) is None or number >= len(visible):
            raise ConfigError(f"got {part!r}; accepted are numbers from 0 to {len(visible) - 1}.", where="--devices")
    return [visible[int(part)] for part in indices]


def number_or_auto(text: str, where: str, least: int) -> int | None:
    """A number of at least `least`; None for `auto`."""
    if text == AUTO:
        return None
    number = read_count(text)
    if number is None or not least <= number <= MOST_PROCESSES:
        raise ConfigError(f"got {text!r}; accepted are auto and numbers from {least} to {MOST_PROCESSES}.", where=where)
    return number


def read_count(text: str) -> int | None:
    """A number in digits; None for other texts and numbers beyond any bound."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None


def check_cpu_processes(number: int, where: str) -> None:
    """ConfigError for more processes than this machine's CPU cores can run at once; a few are allowed to test with."""
    cores = os.cpu_count() or 1
    most = max(16, 4 * cores)
    if number > most:
        found = f"takes {number:,} processes, and {counted(cores, 'CPU core')} can run {most}"
        raise ConfigError(f"{found}; use at most {most}.", where=where)


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
