"""Processes that join over the network are the stages of one layout, to the bits of one device."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from replicated_runs import free_port
from small_model import small_model
from tiny_models import assert_same_bits, finish, job_spec, random_data, submit, train

from weft.engine.engine import Engine
from weft.errors import ConfigError, JobError
from weft.model.load import load_backbone
from weft.model.resolve import resolve
from weft.parallel.replicas import joined_stages
from weft.parallel.replicas.connections import KEY_VARIABLE, connect
from weft.parallel.replicas.joined_stages import JoinedStages
from weft.parallel.replicas.messages import BeStage, EndRank, RankJoined, RefuseRank
from weft.parallel.stages.load_stages import StageLayout, load_stages
from weft.parallel.stages.stage_pool import StageLostError
from weft.plan.cost.types import LinearCost
from weft.plan.pipeline.build import PipelinePlanner, Schedule
from weft.plan.spread import SpreadPlanner
from weft.processes import ChildProcess
from weft.spec import BackboneSpec
from weft.store.run_dir import library_versions

SPEC = BackboneSpec(str(small_model(4)), device="cpu")
ADAPTER = "adapter/adapter_model.safetensors"


@pytest.fixture
def address() -> tuple[str, int]:
    return "127.0.0.1", free_port()


@pytest.fixture
def stages(address: tuple[str, int]) -> Iterator[JoinedStages]:
    opened = JoinedStages(address, "key")
    yield opened
    opened.end()


@pytest.fixture
def join(address: tuple[str, int]) -> Iterator[Callable[..., Connection]]:
    """Joins from a host with a GPU; the tests are the process."""
    with ExitStack() as stack:

        def joined(host: str, gpu: str = "", **versions: str) -> Connection:
            connection = stack.enter_context(connect(address, "key"))
            connection.send(RankJoined(host, 7, {**library_versions(), **versions}, gpu))
            return connection

        yield joined


@pytest.fixture
def ranks(address: tuple[str, int], tmp_path: Path) -> Iterator[Callable[[], ChildProcess]]:
    """Starts `weft rank`, as a user does on another machine."""
    started: list[ChildProcess] = []

    def start() -> ChildProcess:
        variables = {**os.environ, KEY_VARIABLE: "key", "OMP_NUM_THREADS": "1"}
        words = ("rank", "--connect", f"{address[0]}:{address[1]}")
        log = tmp_path / f"rank-{len(started)}.log"
        started.append(ChildProcess("weft.cli.main", words, variables=variables, name=log.stem, log=log))
        return started[-1]

    yield start
    for process in started:
        process.kill()


def test_processes_when_they_join_then_neighbours_are_on_one_machine_and_the_rest_wait(stages, join):
    found = []
    for number, device in enumerate([("b", "0"), ("c", ""), ("a", "1"), ("a", "0")], start=1):
        found.append(join(*device))
        while stages._new.qsize() < number:
            os.sched_yield()
    far, gone, first, second = found
    gone.close()
    assert [stage.device for stage in stages.start(2)] == [("a", "1"), ("b", "0")]
    assert first.recv() == far.recv() == BeStage()
    (spare,) = stages.start(1)
    assert spare.device == ("a", "0") and second.recv() == BeStage()


def test_process_when_its_versions_differ_then_both_sides_learn_which(stages, join):
    connection = join("far", torch="1.0")
    with pytest.raises(ConfigError, match=r"on far has torch 1\.0, the controller"):
        stages.start(1)
    assert isinstance(connection.recv(), RefuseRank)


def test_start_when_too_few_join_then_reports_how_many_did_and_the_rest_are_sent_the_end(stages, join, monkeypatch):
    monkeypatch.setattr(joined_stages, "JOIN_S", 0.0)
    connection = join("far")
    with pytest.raises(JobError, match="of 2 ranks joined within 0 s; --resume waits for them again"):
        stages.start(2)
    while stages._new.empty() and not stages._spare:
        os.sched_yield()
    stages.end()
    assert connection.recv() == EndRank()


def test_jobs_when_a_joined_stage_is_killed_then_it_joins_again_and_the_bits_are_those_of_one_device(stages, ranks):
    """All of them by themselves; a rank ends when its run does."""
    settings: dict[str, Any] = {"max_steps": 2, "max_grad_norm": 0.1, "adapter": {"lora_dropout": 0.1}}
    own = [(job_spec("job", **settings), random_data(1, num_samples=6))]
    expected = train(load_backbone(SPEC), own, capacity=32)
    processes = [ranks(), ranks()]
    layout = StageLayout((2,), is_joined=True)
    executor = load_stages(resolve(SPEC), layout, hosts=stages)
    engine = Engine(executor, capacity=32, planner=PipelinePlanner(Schedule.ONE_F_ONE_B, 2))
    submit(engine, *own)
    os.kill(executor.stages.processes[1].joined.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    with pytest.raises(StageLostError, match=r"stage 1: on .* has gone, so all stages were ended"):
        engine.run()
    engine.close()
    engine = Engine(
        load_stages(resolve(SPEC), layout, hosts=stages), capacity=32, planner=PipelinePlanner(Schedule.ONE_F_ONE_B, 2)
    )
    submit(engine, *own)
    assert_same_bits(finish(engine)["job"], expected["job"])
    engine.close()
    assert [process.wait(20.0) for process in processes] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [StageLayout((1, 1), is_joined=True), StageLayout((1, 1), shards=(2,), is_joined=True)],
    ids=["spread", "shards"],
)
def test_jobs_when_joined_replicas_share_them_then_have_the_bits_of_one_device(stages, ranks, layout):
    own: list[Any] = [
        (job_spec(name, max_steps=3, gradient_sum=kind), random_data(seed, num_samples=9))
        for seed, (name, kind) in enumerate({"a": "any_order", "b": "in_order"}.items())
    ]
    expected = train(load_backbone(SPEC), own, capacity=32)
    ranks(), ranks()
    executor = load_stages(resolve(SPEC), layout, hosts=stages)
    costs = (LinearCost(), LinearCost())
    engine = Engine(executor, capacity=32, planner=SpreadPlanner((1, 1), costs, shards=layout.shards))
    submit(engine, *own)
    for name, outcome in finish(engine).items():
        assert_same_bits(outcome, expected[name])
    engine.close()


@pytest.mark.slow
@pytest.mark.faults
def test_run_when_a_machine_is_lost_then_another_joins_instead_and_no_byte_changes(tmp_path, ranks, address):
    """As a user runs it: one of the ranks is killed with its children, and one is started by hand."""
    variables = {**os.environ, KEY_VARIABLE: "key", "OMP_NUM_THREADS": "1"}
    weft = [sys.executable, "-m", "weft"]
    subprocess.run([*weft, "init"], cwd=tmp_path, env=variables, check=True, capture_output=True)
    command = [*weft, "train", "jobs.yaml", "defaults.max_steps=16", "defaults.save_steps=2", "--out"]
    subprocess.run([*command, "one"], cwd=tmp_path, env=variables, check=True, capture_output=True)
    words = [*command, "joined", "--layout", "stages:2", "--listen", f"{address[0]}:{address[1]}"]
    seen = ""
    with subprocess.Popen(words, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, text=True) as run:
        _, lost = ranks(), ranks()
        for line in run.stdout or ():
            seen += line
            if re.search(r"step [4-9]/16", line) and lost.returncode is None:
                lost.kill()
                lost.wait()
                ranks()
    assert run.returncode == 0, seen
    assert f"ranks     start 2 of them with: weft rank --connect {address[0]}:{address[1]}" in seen
    assert "has gone, so all stages were ended. They start again" in seen
    for job in ("shout", "reverse"):
        assert (tmp_path / "joined" / job / ADAPTER).read_bytes() == (tmp_path / "one" / job / ADAPTER).read_bytes()
