"""Keeps child processes running: whoever dies is started again, a little later each time; all end together.

A child gets SIGTERM when this process dies, however it dies, so that no worker trains on behind a dead service.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

LOG = logging.getLogger("weft.serve")
POLL_S = 0.2
BACKOFF_S = (0.5, 30.0)
STEADY_S = 60.0
"""A child that lived this long is not blamed for earlier deaths."""
_START = (
    "import ctypes, json, signal, sys\n"
    "if sys.platform == 'linux': ctypes.CDLL(None).prctl(1, signal.SIGTERM)\n"
    "sys.argv = ['weft', *json.loads(sys.stdin.buffer.readline())]\n"
    "from weft.cli.main import main\n"
    "main()\n"
)
"""What a child runs. Its arguments come on standard input: everybody on the machine can read a command line, and the
database's URL may hold a password."""
_ENDED_WELL = (0, -signal.SIGTERM)
"""Whoever is told to stop before it listens to signals has nothing to give back."""


@dataclass
class Child:
    """One process to keep running: `weft` with these arguments."""

    name: str
    arguments: Sequence[str]
    pass_fds: Sequence[int] = ()
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    start_at: float = 0.0
    backoff_s: float = field(default=BACKOFF_S[0])


class Supervisor:
    """Runs children in a thread of its own until `stop`."""

    def __init__(self, children: Sequence[Child]) -> None:
        self.children = list(children)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)

    def start(self) -> None:
        """Starts all children; returns at once."""
        self._thread.start()

    def ask_to_stop(self) -> None:
        """Starts nobody any more, and asks every child to drain; may be called from a signal handler."""
        self._stopping.set()
        for child in self.children:
            _send(child, signal.SIGTERM)

    def stop(self, grace_s: float) -> bool:
        """Waits for the children to end; those that have not after the grace are killed. True if all ended well."""
        self._stopping.set()
        self._thread.join(timeout=POLL_S * 10)
        # One may have started between the first request and the end of the thread.
        for child in self.children:
            if child.process is not None and child.process.poll() is None and child.started_at > time.monotonic() - 1:
                _send(child, signal.SIGTERM)
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
        return clean

    def _watch(self) -> None:
        while not self._stopping.is_set():
            for child in self.children:
                self._look_after(child)
            self._stopping.wait(POLL_S)

    def _look_after(self, child: Child) -> None:
        at = time.monotonic()
        if child.process is not None:
            code = child.process.poll()
            if code is None:
                return
            steady = at - child.started_at > STEADY_S
            child.backoff_s = BACKOFF_S[0] if steady else min(BACKOFF_S[1], child.backoff_s * 2)
            child.process, child.start_at = None, at + child.backoff_s
            fields = {"child": child.name, "code": code, "again_in_s": child.backoff_s}
            LOG.warning("a process ended", extra={"fields": fields})
        if at >= child.start_at and not self._stopping.is_set():
            child.started_at = at
            child.process = _start(child)
            LOG.info("started", extra={"fields": {"child": child.name, "pid": child.process.pid}})


def _start(child: Child) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", _START, child.name],
        pass_fds=child.pass_fds,
        stdin=subprocess.PIPE,
        # A terminal's Ctrl-C is for this process, which then tells its children once.
        start_new_session=True,
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(json.dumps(list(child.arguments)).encode() + b"\n")
    return process


def _send(child: Child, number: int) -> None:
    if child.process is not None and child.process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            child.process.send_signal(number)
