"""The starter of this process: it is begun when a process is wanted, or before, and ends with this one.

Libraries read the environment when they are imported, so a starter forks for one environment: whoever wants another
gets a new starter. Nobody needs one: where there is none to be had, processes are started alone.
"""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from weft.starter.child_process import ChildProcess
from weft.starter.order import ProcessOrder

PROGRAM = "weft.starter.forking"
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
LATE = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "GLOO_SOCKET_IFNAME",
        "WEFT_FAULTS",
        "WEFT_RANK_KEY",
        "TORCHINDUCTOR_CACHE_DIR",  # torch sets it itself when it is imported
        "PYTEST_CURRENT_TEST",
    }
)
"""Variables that nobody reads before a program runs, so they may differ from process to process."""


class Starter:
    """A process that imports and forks."""

    def __init__(self, variables: Mapping[str, str], modules: Sequence[str]) -> None:
        """`variables`: the environment that it imports `modules` in."""
        self._variables = _early(variables)
        self._owner = os.getpid()
        self._control, its = socket.socketpair()
        with its:
            self._process = subprocess.Popen(
                # Modules are found where this process finds them, and nowhere else.
                [sys.executable, "-P", "-m", PROGRAM, str(its.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[its.fileno()],
                env={**self._variables, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,
            )
        assert self._process.stdin is not None
        with suppress(OSError), self._process.stdin as told:  # it may have ended already
            told.write("\n".join(modules).encode())
        atexit.register(self.close)

    def fits(self, variables: Mapping[str, str]) -> bool:
        """Whether its processes may have that environment."""
        return self._owner == os.getpid() and self._variables == _early(variables) and not self.has_ended()

    def has_ended(self) -> bool:
        """Whether it is no more."""
        return self._process.poll() is not None

    def is_unfit(self) -> bool:
        """Whether it has found that it cannot import, or not fork: another one would not fare better."""
        return (self._process.poll() or 0) > 0

    def start(self, order: ProcessOrder, out: int, files: Sequence[int] = ()) -> ChildProcess:
        """Starts a process that it fits; it prints into `out`, and has `files`. Both may be closed then.

        Nobody waits for it: it is there when the starter has imported everything.
        """
        return ChildProcess(order, out, files, self._ask(order, out, files))

    def _ask(self, order: ProcessOrder, out: int, files: Sequence[int]) -> Connection | None:
        """The link on which a process will say that it runs; None if nobody hears."""
        link, its = Pipe()
        folder = os.open(".", os.O_PATH)
        try:
            with its:
                socket.send_fds(self._control, [b"+"], [its.fileno(), folder, out, *files])
            link.send(order)
        except OSError:
            link.close()
            return None
        finally:
            os.close(folder)
        return link

    def retire(self) -> None:
        """Asks for no more processes; it ends with the last that it has started."""
        self._control.close()

    def close(self) -> None:
        """Ends it, whatever it is at; its processes live on."""
        atexit.unregister(self.close)
        if self._owner == os.getpid():
            self._control.close()
            self._process.kill()
            self._process.wait()


def begin(variables: Mapping[str, str] | None = None) -> None:
    """Has a starter import what processes need, so that they are there soon when they are wanted."""
    with _LOCK:
        _starter(os.environ if variables is None else variables)


def start_process(order: ProcessOrder, out: int, files: Sequence[int] = ()) -> ChildProcess:
    """The same as `Starter.start`, by the starter of this process or, where it can have none, alone."""
    with _LOCK:
        starter = _starter(order.variables)
        return ChildProcess(order, out, files) if starter is None else starter.start(order, out, files)


_LOCK = threading.Lock()
_STARTERS: list[Starter] = []
"""The last is the one that is asked; others have processes that still run."""


def _starter(variables: Mapping[str, str]) -> Starter | None:
    """One for this environment; None where there is none to be had."""
    if not _can_fork() or any(starter.is_unfit() for starter in _STARTERS):
        return None
    if _STARTERS and _STARTERS[-1].fits(variables):
        return _STARTERS[-1]
    for starter in _STARTERS:
        starter.retire()
    _STARTERS[:] = [starter for starter in _STARTERS if not starter.has_ended()]
    with suppress(OSError):  # no process is to be had; whoever wants one alone will hear it
        _STARTERS.append(Starter(variables, PRELOADED))
        return _STARTERS[-1]
    return None


def _can_fork() -> bool:
    """Whether processes can be watched that are not this one's own: on Linux since 5.3."""
    if sys.platform != "linux":
        return False
    with suppress(OSError):
        os.close(os.pidfd_open(os.getpid()))
        return True
    return False


def _early(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in LATE}
