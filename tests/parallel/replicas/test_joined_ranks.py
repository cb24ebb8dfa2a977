"""Ranks that are started elsewhere join a controller over the network, if they hold its key and one is missing."""

from __future__ import annotations

import os
import re
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError
from pathlib import Path
from typing import Any

import pytest
from replicated_runs import free_port

from weft.parallel.replicas import connections
from weft.parallel.replicas.connections import RankEnded, connect
from weft.parallel.replicas.hosts import JoinedRanks
from weft.parallel.replicas.messages import EndRank, RankAlive, RankFailed, RankJoined, RankOrder, RefuseRank, SetUp
from weft.spec import AdapterSpec, BackboneSpec
from weft.store.run_dir import library_versions

ORDER = RankOrder(BackboneSpec(base_model="tiny"), 96, 96, "auto", (AdapterSpec(),))
PAGE = Path(__file__).parents[3] / "docs" / "clusters.md"


@pytest.fixture
def address() -> tuple[str, int]:
    return "127.0.0.1", free_port()


@pytest.fixture
def ranks(address: tuple[str, int]) -> Iterator[JoinedRanks]:
    opened = JoinedRanks(ORDER, address, "key")
    yield opened
    opened.close()


@pytest.fixture
def join(address: tuple[str, int]) -> Callable[..., Any]:
    """Joins as a rank; returns its connection and the first message it got."""

    def joined(key: str = "key", **versions: str) -> tuple[Any, Any]:
        connection = connect(address, key)
        connection.send(RankJoined("far", 7, {**library_versions(), **versions}))
        return connection, connection.recv()

    return joined


def test_rank_when_it_joins_then_it_gets_its_index_and_reports_until_it_is_gone(ranks, join):
    handle = ranks.start(0)
    connection, answer = join()
    assert answer == SetUp(0, ORDER)
    connection.send(RankAlive())
    assert ranks.inbox.get(timeout=20) == (handle, RankAlive())
    connection.close()
    assert ranks.inbox.get(timeout=20) == (handle, RankEnded("on far has gone", is_accident=True))


def test_rank_when_none_is_missing_then_it_is_refused_and_may_take_the_next_free_index(ranks, join):
    ranks.start(0)
    first, _ = join()
    _, answer = join()
    assert isinstance(answer, RefuseRank) and "the run has all its ranks" in str(answer.error)
    first.close()
    ranks.inbox.get(timeout=20)
    ranks.start(0)
    assert join()[1] == SetUp(0, ORDER)


def test_rank_when_its_versions_differ_then_both_sides_learn_which(ranks, join):
    handle = ranks.start(0)
    _, answer = join(torch="1.0")
    problem = r"rank 0: on far has torch 1\.0, the controller .*; results would differ in their last bits"
    assert isinstance(answer, RefuseRank) and re.search(problem, str(answer.error))
    rank, report = ranks.inbox.get(timeout=20)
    assert rank is handle and isinstance(report, RankFailed) and str(report.error) == str(answer.error)


def test_stranger_when_it_has_no_key_then_it_is_not_let_in_and_others_still_join(ranks, address, join):
    """Nor does one that connects and sends nothing keep others out."""
    ranks.start(0)
    with socket.create_connection(address) as silent:
        with pytest.raises(AuthenticationError):
            join("another key")
        assert join()[1] == SetUp(0, ORDER)
        assert silent.fileno() > 0


def test_stranger_when_it_sends_nothing_for_long_then_it_is_disconnected(ranks, address, monkeypatch):
    monkeypatch.setattr(connections, "HANDSHAKE_S", 0.0)
    with socket.create_connection(address) as silent:
        silent.settimeout(20)
        while silent.recv(4096):
            pass


def test_rank_when_the_controller_gives_it_up_then_its_connection_ends(ranks, join):
    handle = ranks.start(0)
    connection, _ = join()
    while handle.connection is None:
        os.sched_yield()
    ranks.kill(handle)
    with pytest.raises((EOFError, ConnectionError)):
        connection.recv()
    assert ranks.inbox.get(timeout=20) == (handle, RankEnded("on far has gone", is_accident=True))


def test_rank_when_none_joins_then_giving_it_up_reports_it(ranks):
    handle = ranks.start(0)
    ranks.kill(handle)
    assert ranks.inbox.get(timeout=20) == (handle, RankEnded("was not joined"))


def test_close_when_ranks_have_joined_then_they_are_sent_the_end(ranks, join, monkeypatch):
    monkeypatch.setattr("weft.parallel.replicas.hosts.END_S", 0.0)
    handle = ranks.start(0)
    connection, _ = join()
    while handle.connection is None:
        os.sched_yield()
    ranks.close()
    assert connection.recv() == EndRank()


def recipe(mark: str) -> str:
    """A recipe of the page for users."""
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    (found,) = [block for block in blocks if mark in block]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mark", "program", "stand_in"),
    [
        ("ssh ", "ssh", 'shift; exec bash -c "$*"'),
        ("SBATCH", "srun", 'for i in $(seq "$SLURM_NTASKS"); do "$@" & done; wait'),
    ],
)
def test_recipe_when_followed_then_ranks_join_and_every_job_is_trained(tmp_path, mark, program, stand_in):
    """ssh and srun are stand-ins that start processes here; all else is as on the page."""
    text = recipe(mark).replace("7070", str(free_port())).replace("jobs.yaml", "jobs.yaml defaults.max_steps=2")
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / program).write_text(f"#!/bin/bash\n{stand_in}\n")
    (tools / program).chmod(stat.S_IRWXU)
    (tools / "hostname").write_text("#!/bin/bash\necho localhost\n")
    (tools / "hostname").chmod(stat.S_IRWXU)
    (tools / "weft").write_text(f'#!/bin/bash\nexec {sys.executable} -m weft "$@"\n')
    (tools / "weft").chmod(stat.S_IRWXU)
    variables = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "SLURM_NTASKS": "2", "OMP_NUM_THREADS": "1"}
    script = f"set -e\nweft init\n{text}"
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "replicas  2, on the machines where they were started" in done.stdout
    assert len(list(tmp_path.glob("runs/*/*/adapter/adapter_model.safetensors"))) == 2
