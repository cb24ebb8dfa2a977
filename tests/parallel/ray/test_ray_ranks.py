"""Jobs over actors of a Ray cluster end with the bytes of one process, whatever becomes of actors and nodes."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_runs import bytes_of, run_spec, train, write_data

from weft.engine.events import Event, JobEnded, JobWarning, StepDone
from weft.errors import ConfigError
from weft.parallel.ray.api import find_hosts
from weft.parallel.ray.connect import need_ray
from weft.parallel.replicas.hosts import ReplicaHosts

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
    """Does something when half of the steps are taken."""
    steps = Counter[str]()

    def hear(engine: Any, event: Event) -> None:
        steps["all"] += isinstance(event, StepDone)
        if steps["all"] == 18 and not steps["acted"]:
            steps["acted"] += 1
            act(engine)

    return hear


def ranks_of(engine: Any) -> list[Any]:
    return [rank.process for rank in engine._ranks]


def assert_well(states: dict[str, Any], events: list[Event], out: Path, expected: dict[str, bytes]) -> None:
    assert set(states.values()) == {"succeeded"}
    assert Counter(event.job for event in events if isinstance(event, JobEnded)) == Counter(list(states))
    assert bytes_of(out, SPEC) == expected


def places(number: int | None = 2) -> ReplicaHosts:
    return find_hosts("auto", number, SPEC.backbone)


def test_run_when_an_actors_process_is_killed_then_jobs_go_on_to_the_bytes_of_one_process(
    cluster, data, expected, tmp_path
):
    def kill(engine: Any) -> None:
        os.kill(ranks_of(engine)[0].pid, signal.SIGKILL)

    states, events = train(SPEC, data, tmp_path / "out", places(), once(kill))
    assert_well(states, events, tmp_path / "out", expected)
    (says,) = [event.message for event in events if isinstance(event, JobWarning)]
    assert says.startswith("replica 0 died on ") and says.endswith("its jobs go on from their last checkpoints")


def test_run_when_more_replicas_are_asked_for_than_there_are_then_says_how_many_there_are(cluster):
    with pytest.raises(ConfigError, match=r"--replicas: got 3; the cluster has 2 CPUs\."):
        places(3)


def test_run_when_a_node_is_lost_then_jobs_go_on_to_the_bytes_of_one_process(cluster, data, expected, tmp_path):
    def lose(engine: Any) -> None:
        cluster.remove_node(cluster.spare, allow_graceful=False)

    states, events = train(SPEC, data, tmp_path / "out", places(), once(lose))
    assert_well(states, events, tmp_path / "out", expected)
    says = [event.message for event in events if isinstance(event, JobWarning)]
    assert says and all(text.startswith("replica ") for text in says)
