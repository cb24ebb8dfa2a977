"""Keeps the service's processes running: children on this machine, and workers as actors of a Ray cluster.

A child that dies is started again, a little later each time; all end together. A child gets SIGTERM when this process
dies, however it dies, so that no worker outlives its service. While this process lives it sends the signal
only once, because a second one stops a worker without saving.

A request comes before a training step. Workers share the processor's cores and leave one for requests: training on a
CPU waits for the slowest of its threads, so one thread that makes way for a request costs as much as if all did. Where
there is no core to leave, or other programs take it, workers have a lower priority (`nice`) and the API its share.

On a cluster, an actor keeps one `weft worker` running on its node, and Ray starts it again wherever there is room. It
needs nothing of the service but the database and the file store.
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
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.errors import ConfigError
from weft.parallel.ray.connect import ClusterConnection, ReplicaRequest, connect, need_ray, replica_request
from weft.processes import num_cores

LOG = logging.getLogger("weft.serve")
POLL_S = 0.2
BACKOFF_S = (0.5, 30.0)
STEADY_S = 60.0
"""A child that lived this long starts again as soon as one that never died."""
WORKER_NICE = 5
"""The `nice` value of workers, so that requests come first. Beside another busy program, a worker gets a quarter of a
core and not a half; the API, which is idle most of the time, gets a core as soon as a request comes."""
DISMISSED = 76
"""The exit code of a worker that an operator has sent away: it is not started again."""
_START = (
    "import ctypes, json, os, signal, sys\n"
    "os.nice(int(sys.argv[2]))\n"
    "if sys.platform == 'linux': ctypes.CDLL(None).prctl(1, signal.SIGTERM)\n"
    "signal.signal(signal.SIGTTOU, signal.SIG_IGN)\n"
    "sys.argv = ['weft', *json.loads(sys.stdin.buffer.readline())]\n"
    "from weft.cli.main import run\n"
    "run()\n"
)
"""The program of a child. It reads its arguments from standard input, because every user of the machine can read a
command line and the database's URL may hold a password. Its log goes to a terminal even where only the foreground may
write (`tostop`)."""
_ENDED_WELL = (0, -signal.SIGTERM, DISMISSED)
"""Exit codes of a clean end; a child that gets SIGTERM before it handles signals has nothing to give back."""


@dataclass
class Child:
    name: str
    arguments: Sequence[str]
    pass_fds: Sequence[int] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    is_signalled: bool = False
    is_dismissed: bool = False
    started_at: float = 0.0
    start_at: float = 0.0
    backoff_s: float = field(default=BACKOFF_S[0])

    @property
    def trains(self) -> bool:
        return list(self.arguments[:1]) == ["worker"]


class Supervisor:
    """Starts and restarts children in a thread of its own until `stop`."""

    def __init__(self, children: Sequence[Child]) -> None:
        self.children = list(children)
        self._num_threads = max(1, (num_cores() - 1) // max(1, sum(child.trains for child in children)))
        self._stopping = threading.Event()
        self._is_stable = threading.Event()
        """Set when no more children are started."""
        self._all_ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def request_stop(self) -> None:
        """Starts no more children and has every child drain; a signal handler may call it."""
        self._stopping.set()
        for child in self.children:
            _signal_stop(child)

    def stop(self, grace_s: float) -> bool:
        """Waits for the children, kills those that outlast `grace_s`, and returns whether all ended well."""
        self._stopping.set()
        self._is_stable.wait(POLL_S * 10)
        # A child may have been started just when the others were stopped.
        for child in self.children:
            _signal_stop(child)
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
            child.started_at, child.is_signalled = at, False
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


def _start(child: Child, num_threads: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", _START, child.name, str(WORKER_NICE if child.trains else 0)],
        # A value that the operator has set is kept.
        env={"OMP_NUM_THREADS": str(num_threads), **os.environ, **child.variables} if child.trains else None,
        pass_fds=child.pass_fds,
        stdin=subprocess.PIPE,
        # Ctrl-C in a terminal reaches only this process, which then signals its children once. A child gets no session
        # of its own: Linux shares the processor between sessions first, and `nice` counts only within one.
        process_group=0,
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(json.dumps(list(child.arguments)).encode() + b"\n")
    return process


def _signal_stop(child: Child) -> None:
    if child.process is not None and child.process.poll() is None and not child.is_signalled:
        child.is_signalled = True
        with contextlib.suppress(ProcessLookupError):
            child.process.send_signal(signal.SIGTERM)


SLACK_S = 10.0
"""Seconds that an actor's answer may take beyond what its worker may."""


class WorkerActor:
    """Keeps one worker running on the node that it is on."""

    def __init__(self, name: str, arguments: Sequence[str], folder: Path, *, is_spread: bool) -> None:
        """`folder`: the working directory of the service. With `is_spread`, prompts come from other machines."""
        with suppress(OSError):
            os.chdir(folder)
        if is_spread:
            arguments = [*arguments, "--host", need_ray().util.get_node_ip_address()]
        self._supervisor = Supervisor([Child(name, arguments)])
        self._supervisor.start()

    def where(self) -> str:
        return str(need_ray().util.get_node_ip_address())

    def stop(self, grace_s: float) -> bool:
        """Waits for the worker's end; returns whether it ended well."""
        self._supervisor.request_stop()
        return self._supervisor.stop(grace_s)


class ClusterWorkers:
    def __init__(self, connection: ClusterConnection, request: ReplicaRequest) -> None:
        self._connection = connection
        self._request = request
        self._actors: dict[str, Any] = {}

    @property
    def number(self) -> int:
        return self._request.number

    def start(self, workers: Mapping[str, Sequence[str]]) -> None:
        ray = need_ray()
        resources = dict(self._request.bundle)
        kind = ray.remote(WorkerActor).options(
            num_cpus=resources.pop("CPU", 0),
            num_gpus=resources.pop("GPU", 0),
            resources=resources,
            max_restarts=-1,
            max_concurrency=4,
        )
        is_spread = not self._connection.is_here
        for name, arguments in workers.items():
            self._actors[name] = kind.remote(name, list(arguments), Path.cwd(), is_spread=is_spread)
            threading.Thread(target=self._report_start, args=(name,), daemon=True).start()

    def stop(self, grace_s: float) -> bool:
        """Waits for all workers, ends those that outlast `grace_s`, and returns whether all ended well."""
        ray = need_ray()
        ended = [actor.stop.remote(grace_s) for actor in self._actors.values()]
        done, _ = ray.wait(ended, num_returns=len(ended), timeout=grace_s + SLACK_S)
        clean = len(done) == len(ended)
        for ref in done:
            try:
                clean &= ray.get(ref)
            except ray.exceptions.RayError:
                clean = False
        for actor in self._actors.values():
            ray.kill(actor)
        self._connection.close()
        return clean

    def _report_start(self, name: str) -> None:
        ray = need_ray()
        try:
            fields = {"child": name, "node": ray.get(self._actors[name].where.remote())}
            LOG.info("started", extra={"fields": fields})
        except ray.exceptions.RayError as error:
            last = str(error).strip().splitlines()[-1:]
            LOG.error("a worker cannot be started", extra={"fields": {"child": name, "error": "".join(last)}})


def find_workers(
    address: str, number: int | None, num_models: int, *, db_url: str, gpu_type: str | None
) -> ClusterWorkers:
    """Connects to a cluster and chooses the nodes of workers; ConfigError for more than there is room for. `number` is
    of workers for each backbone; None: as many as there are GPUs, or nodes without them, shared evenly."""
    connection = connect(address, num_cpus=None if number is None else number * num_models)
    try:
        if db_url.startswith("sqlite") and not connection.is_here:
            found = "is SQLite, which is for one machine, and the cluster has others"
            raise ConfigError(f"{found}; use postgresql://….", where="--db")
        total = None if number is None else number * num_models
        request = replica_request(connection.nodes, total, device="auto", gpu_type=gpu_type)
        if request.number < num_models:
            found = f"there is room for {request.number}, and {num_models} backbones need a worker each"
            raise ConfigError(f"{found}.", where="--workers")
    except ConfigError as error:
        connection.close()
        raise (error.at("--workers") if error.where == "--replicas" else error) from None
    return ClusterWorkers(connection, ReplicaRequest(request.number // num_models * num_models, request.bundle))
