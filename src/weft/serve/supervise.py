"""Keeps child processes running: a child that dies is started again, a little later each time; all end together.

A child gets SIGTERM when this process dies, however it dies, so that no worker trains on behind a dead service. While
this process lives it sends the signal only once, because a second one tells a worker not to save anything.

A request comes before a training step. Workers share the processor's cores and leave one for requests: training on a
CPU waits for the slowest of its threads, so one thread that makes way for a request costs as much as if all did. Where
there is no core to leave, or other programs take it, workers stand back (`nice`) and the API keeps its share.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

LOG = logging.getLogger("weft.serve")
POLL_S = 0.2
BACKOFF_S = (0.5, 30.0)
STEADY_S = 60.0
"""A child that lived this long starts again as soon as one that never died."""
WORKER_NICE = 5
"""How far workers stand back behind requests. Beside another program that never rests, a worker so gets a quarter of a
core and not a half; the API, which rests most of the time, gets a core as soon as a request comes."""
DISMISSED = 76
"""The exit code of a worker that an operator has sent away: it is not started again."""
_START = (
    "import ctypes, json, os, signal, sys\n"
    "os.nice(int(sys.argv[2]))\n"
    "if sys.platform == 'linux': ctypes.CDLL(None).prctl(1, signal.SIGTERM)\n"
    "signal.signal(signal.SIGTTOU, signal.SIG_IGN)\n"
    "sys.argv = ['weft', *json.loads(sys.stdin.buffer.readline())]\n"
    "from weft.cli.main import main\n"
    "main()\n"
)
"""The program of a child. It reads its arguments from standard input, because everybody on the machine can read a
command line and the database's URL may hold a password. Its log goes to a terminal even where only the foreground may
write (`tostop`)."""
_ENDED_WELL = (0, -signal.SIGTERM, DISMISSED)
"""Exit codes of a clean end; a child that gets SIGTERM before it handles signals has nothing to give back."""


@dataclass
class Child:
    """One process to keep running: `weft` with these arguments."""

    name: str
    arguments: Sequence[str]
    pass_fds: Sequence[int] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of its environment, such as the GPU that is its own."""
    process: subprocess.Popen[bytes] | None = None
    is_told: bool = False
    """The child was asked to stop."""
    is_dismissed: bool = False
    """The child has ended for good."""
    started_at: float = 0.0
    start_at: float = 0.0
    backoff_s: float = field(default=BACKOFF_S[0])

    @property
    def trains(self) -> bool:
        """Whether the child is a worker, and not another process that answers requests."""
        return list(self.arguments[:1]) == ["worker"]


class Supervisor:
    """Starts and restarts children in a thread of its own until `stop`."""

    def __init__(self, children: Sequence[Child]) -> None:
        self.children = list(children)
        self._num_threads = max(1, (_num_cores() - 1) // max(1, sum(child.trains for child in children)))
        self._stopping = threading.Event()
        self._is_stable = threading.Event()
        """No child is started any more."""
        self._all_ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)

    def start(self) -> None:
        """Starts all children; returns at once."""
        self._thread.start()

    def ask_to_stop(self) -> None:
        """Starts no more children and asks every child to drain; a signal handler may call it."""
        self._stopping.set()
        for child in self.children:
            _ask_to_stop(child)

    def stop(self, grace_s: float) -> bool:
        """Waits for the children, kills those that outlast `grace_s`, and returns whether all ended well."""
        self._stopping.set()
        self._is_stable.wait(POLL_S * 10)
        # A child may have been started just when the others were asked to stop.
        for child in self.children:
            _ask_to_stop(child)
        deadline = time.monotonic() + grace_s
        clean = True
        for child in self.children:
            if child.process is None:
                continue
            try:
                clean &= child.process.wait(max(0.1, deadline - time.monotonic())) in _ENDED_WELL
            except subprocess.TimeoutExpired:
                LOG.error("killed", extra={"fields": {"child": child.name, "grace_s": grace_s}})
                child.process.kill()
                child.process.wait()
                clean = False
        self._all_ended.set()
        return clean

    def _watch(self) -> None:
        while not self._stopping.is_set():
            for child in self.children:
                self._look_after(child)
            self._stopping.wait(POLL_S)
        self._is_stable.set()
        # Linux takes the thread that started a child for its parent and sends SIGTERM when that thread ends.
        self._all_ended.wait()

    def _look_after(self, child: Child) -> None:
        at = time.monotonic()
        if child.process is not None:
            code = child.process.poll()
            if code is None:
                return
            if code == DISMISSED:
                if not child.is_dismissed:
                    LOG.info("sent away", extra={"fields": {"child": child.name}})
                child.is_dismissed = True
                return
            steady = at - child.started_at > STEADY_S
            child.process = None
            _put_off(child, at, BACKOFF_S[0] if steady else child.backoff_s * 2, "a process ended", code=code)
        if at >= child.start_at and not self._stopping.is_set():
            child.started_at, child.is_told = at, False
            try:
                child.process = _start(child, self._num_threads)
            except OSError as error:
                # The system has no memory or no process to spare now; the other children are looked after all the same.
                _put_off(child, at, child.backoff_s * 2, "a process cannot be started", error=str(error))
                return
            LOG.info("started", extra={"fields": {"child": child.name, "pid": child.process.pid}})


def _put_off(child: Child, at: float, backoff_s: float, message: str, **fields: object) -> None:
    child.backoff_s = min(BACKOFF_S[1], backoff_s)
    child.start_at = at + child.backoff_s
    fields |= {"child": child.name, "again_in_s": child.backoff_s}
    LOG.warning(message, extra={"fields": fields})


def _num_cores() -> int:
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _start(child: Child, num_threads: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", _START, child.name, str(WORKER_NICE if child.trains else 0)],
        # A value that the operator has set is kept.
        env={"OMP_NUM_THREADS": str(num_threads), **os.environ, **child.variables} if child.trains else None,
        pass_fds=child.pass_fds,
        stdin=subprocess.PIPE,
        # Ctrl-C in a terminal reaches only this process, which then tells its children once. The child gets no session
        # of its own, because Linux shares the processor between sessions first and `nice` counts only within one.
        process_group=0,
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(json.dumps(list(child.arguments)).encode() + b"\n")
    return process


def _ask_to_stop(child: Child) -> None:
    if child.process is not None and child.process.poll() is None and not child.is_told:
        child.is_told = True
        with contextlib.suppress(ProcessLookupError):
            child.process.send_signal(signal.SIGTERM)
