"""A run through Ray's client server, as from a laptop, ends with the bytes of one process, or with a sentence."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_runs import bytes_of, run_spec, train, write_data

from weft.engine.events import Event, JobEnded, JobWarning, StepDone
from weft.errors import JobError
from weft.parallel.ray.api import find_hosts

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.filterwarnings("ignore")]
SPEC = run_spec()


@pytest.fixture
def cluster() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Where clients connect to, and the process that the whole cluster ends with."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    script = Path(__file__).with_name("client_cluster.py")
    # With gRPC's handlers of forks, the processes that are to serve clients die now and then as soon as they start.
    variables = {**os.environ, "GRPC_ENABLE_FORK_SUPPORT": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    process = subprocess.Popen(
        [sys.executable, script, str(port)], env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdin is not None
    assert any(line == "ready\n" for line in process.stdout)
    yield f"ray://127.0.0.1:{port}", process
    process.stdin.close()
    process.wait()
    process.stdout.close()


def at_step(number: int, act: Callable[[Any], None]) -> Callable[[Any, Event], None]:
    """Does something once, when so many steps are taken."""
    seen = Counter[str]()

    def on_event(engine: Any, event: Event) -> None:
        seen["steps"] += isinstance(event, StepDone)
        if seen["steps"] == number and not seen["acted"]:
            seen["acted"] += 1
            act(engine)

    return on_event


def test_run_through_a_client_when_an_actor_dies_and_then_the_cluster_then_is_whole_or_reports_it(
    cluster, tmp_path, monkeypatch
):
    """An actor costs nothing but steps; without a cluster the run ends, and goes on anywhere."""
    monkeypatch.setenv("RAY_CLIENT_RECONNECT_GRACE_PERIOD", "3")
    address, process = cluster
    write_data(tmp_path)
    train(SPEC, tmp_path, tmp_path / "alone")
    expected = bytes_of(tmp_path / "alone", SPEC)

    def kill_actor(engine: Any) -> None:
        os.kill(next(iter(engine._ranks)).process.pid, signal.SIGKILL)

    hosts = find_hosts(address, 2, SPEC.backbone)
    states, events = train(SPEC, tmp_path, tmp_path / "far", hosts, at_step(18, kill_actor))
    assert set(states.values()) == {"succeeded"}
    assert Counter(event.job for event in events if isinstance(event, JobEnded)) == Counter(list(states))
    assert [event.message for event in events if isinstance(event, JobWarning)]
    assert bytes_of(tmp_path / "far", SPEC) == expected

    hosts = find_hosts(address, 2, SPEC.backbone)
    with pytest.raises(JobError, match=r"no replica is left: .* the cluster does not answer any more\. Every job goes"):
        train(SPEC, tmp_path, tmp_path / "lost", hosts, at_step(18, lambda engine: process.kill()))
    states, _ = train(SPEC, tmp_path, tmp_path / "lost", resume=True)
    assert set(states.values()) <= {"succeeded"}
    assert bytes_of(tmp_path / "lost", SPEC) == expected
