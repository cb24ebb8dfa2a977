"""Jobs over actors of a Ray cluster end with the bytes of one process, whatever becomes of actors and nodes."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cluster_runs import bytes_of, run_spec, train, write_data
from small_model import small_model
from tiny_models import assert_same_bits, finish, job_spec, random_data, submit
from tiny_models import train as train_here

from weft.engine.engine import Engine
from weft.engine.events import Event, JobEnded, JobWarning, StepDone
from weft.errors import ConfigError
from weft.model.load import load_backbone
from weft.model.resolve import resolve
from weft.parallel.ray.api import find_hosts, open_stages
from weft.parallel.ray.connect import need_ray
from weft.parallel.replicas.hosts import ReplicaHosts
from weft.parallel.stages.load_stages import StageLayout, load_stages
from weft.parallel.stages.stage_pool import StageLostError
from weft.plan.pipeline.build import PipelinePlanner, Schedule
from weft.spec import BackboneSpec

pytestmark = [pytest.mark.slow, pytest.mark.faults]
SPEC = run_spec()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of two nodes on this machine with room for one replica each."""
    ray = need_ray()
    from ray.cluster_utils import Cluster

    settings = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    found = Cluster(initialize_head=True, head_node_args=settings)
    found.spare = found.add_node(num_cpus=1, object_store_memory=80 * 2**20)
    ray.init(address=found.address, log_to_driver=False, logging_level="ERROR", configure_logging=False)
    yield found
    ray.shutdown()
    found.shutdown()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data")
    write_data(path)
    return path


@pytest.fixture(scope="module")
def expected(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of every job where one process trains all of them."""
    out = tmp_path_factory.mktemp("alone") / "out"
    train(SPEC, data, out)
    return bytes_of(out, SPEC)


def once(act: Callable[[Any], None]) -> Callable[[Any, Event], None]:
    """Does something after six steps, when no job of twelve can have ended."""
    steps = Counter[str]()

    def on_event(engine: Any, event: Event) -> None:
        steps["all"] += isinstance(event, StepDone)
        if steps["all"] == 6 and not steps["acted"]:
            steps["acted"] += 1
            act(engine)

    return on_event


def ranks_of(engine: Any) -> list[Any]:
    return [rank.process for rank in engine._ranks]


def assert_well(states: dict[str, Any], events: list[Event], out: Path, expected: dict[str, bytes]) -> None:
    assert set(states.values()) == {"succeeded"}
    assert Counter(event.job for event in events if isinstance(event, JobEnded)) == Counter(list(states))
    assert bytes_of(out, SPEC) == expected


def hosts(number: int | None = 2) -> ReplicaHosts:
    return find_hosts("auto", number, SPEC.backbone)


def test_run_when_an_actors_process_is_killed_then_jobs_go_on_to_the_bytes_of_one_process(
    cluster, data, expected, tmp_path
):
    def kill(engine: Any) -> None:
        os.kill(ranks_of(engine)[0].pid, signal.SIGKILL)

    states, events = train(SPEC, data, tmp_path / "out", hosts(), once(kill))
    assert_well(states, events, tmp_path / "out", expected)
    (message,) = [event.message for event in events if isinstance(event, JobWarning)]
    assert message.startswith("replica 0 died on ") and message.endswith("its jobs go on from their last checkpoints")


def test_run_when_more_replicas_are_requested_than_there_are_then_reports_how_many_there_are(cluster):
    with pytest.raises(ConfigError, match=r"--replicas: got 3; the cluster has 2 CPUs\."):
        hosts(3)


def test_run_when_a_node_is_lost_then_jobs_go_on_to_the_bytes_of_one_process(cluster, data, expected, tmp_path):
    frozen = []

    def lose(engine: Any) -> None:
        (there,) = [rank for rank in ranks_of(engine) if rank.host.node_id == cluster.spare.node_id]
        # It cannot end its jobs before Ray notices that its node is gone.
        os.kill(there.pid, signal.SIGSTOP)
        frozen.append(there.pid)
        cluster.remove_node(cluster.spare, allow_graceful=False)

    try:
        states, events = train(SPEC, data, tmp_path / "out", hosts(), once(lose))
    finally:
        for pid in frozen:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert_well(states, events, tmp_path / "out", expected)
    messages = [event.message for event in events if isinstance(event, JobWarning)]
    assert messages and all(text.startswith("replica ") for text in messages)


def test_layout_when_a_node_is_lost_then_its_process_starts_on_another_to_the_bits_of_one_device(cluster):
    spec = BackboneSpec(str(small_model(4)), device="cpu")
    own = [(job_spec("job", max_steps=2, max_grad_norm=0.1), random_data(1, num_samples=6))]
    expected = train_here(load_backbone(spec), own, capacity=32)
    node = cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)
    stages = open_stages("auto", 2, spec, None)

    def opened() -> Engine:
        executor = load_stages(resolve(spec), StageLayout((2,), is_joined=True), hosts=stages)
        engine = Engine(executor, capacity=32, planner=PipelinePlanner(Schedule.ONE_F_ONE_B, 2))
        submit(engine, *own)
        return engine

    try:
        engine = opened()
        pids = [process.joined.pid for process in engine.executor.stages.processes]  # type: ignore[attr-defined]
        cluster.remove_node(node, allow_graceful=False)
        while all(Path(f"/proc/{pid}").exists() for pid in pids):
            time.sleep(0.05)
        with pytest.raises(StageLostError, match="has gone, so all stages were ended"):
            engine.run()
        engine.close()
        cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)
        engine = opened()
        assert_same_bits(finish(engine)["job"], expected["job"])
        engine.close()
    finally:
        stages.end()
