"""Workers on a cluster are as many as there is room for, and need a database that all machines reach."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weft.errors import ConfigError
from weft.parallel.ray.connect import ClusterNode
from weft.serve import supervise
from weft.serve.supervise import Child, ClusterWorkers, WorkerActor, find_workers


class Cluster:
    """A connection to nodes that are claimed to exist."""

    def __init__(self, nodes: list[ClusterNode], is_here: bool) -> None:
        self.nodes, self.is_here, self.is_closed = nodes, is_here, False

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ClusterWorkers]:
    """What is found on a cluster of machines with so many GPUs."""

    def find(
        *gpus: int, number: int | None = None, models: int = 1, is_here: bool = False, db: str = "postgresql://h/weft"
    ) -> ClusterWorkers:
        cluster = Cluster([ClusterNode("10.0.0.1", 8, count, "H100" if count else None) for count in gpus], is_here)
        monkeypatch.setattr(supervise, "connect", lambda address, **_: cluster)
        try:
            return find_workers("auto", number, models, db_url=db, gpu_type=None)
        except ConfigError:
            assert cluster.is_closed, "the unused connection stays open"
            raise

    return find


def test_workers_when_auto_then_one_on_every_gpu_and_the_same_for_every_backbone(found):
    assert found(4, 1).number == 5
    assert found(4, 1, models=2).number == 4
    assert found(4, 1, number=2, models=2).number == 4
    assert found(0, 0).number == 2, "without GPUs, one on every machine"


@pytest.mark.parametrize(
    ("gpus", "settings", "sentence"),
    [
        ((4,), {"number": 3, "models": 2}, "--workers: got 6; the cluster has 4 H100 GPUs."),
        ((1,), {"models": 2}, "--workers: there is room for 1, and 2 backbones need a worker each."),
        (
            (4,),
            {"db": "sqlite:///weft.db"},
            "--db: is SQLite, which is for one machine, and the cluster has others; use postgresql://….",
        ),
    ],
)
def test_workers_when_the_cluster_cannot_have_them_then_refused_with_the_reason(found, gpus, settings, sentence):
    with pytest.raises(ConfigError) as refused:
        found(*gpus, **settings)
    assert str(refused.value) == sentence


def test_workers_when_the_cluster_is_this_machine_then_its_database_may_be_sqlite(found):
    assert found(1, is_here=True, db="sqlite:///weft.db").number == 1


def test_actor_then_keeps_one_worker_running_and_lets_it_give_its_jobs_back(monkeypatch, tmp_path):
    started: list[Any] = []

    class Recorded:
        def __init__(self, children: list[Child]) -> None:
            started.extend((child.name, child.trains, list(child.arguments)) for child in children)

        def start(self) -> None:
            started.append("start")

        def request_stop(self) -> None:
            started.append("ask")

        def stop(self, grace_s: float) -> bool:
            started.append(grace_s)
            return True

    monkeypatch.setattr(supervise, "Supervisor", Recorded)
    monkeypatch.chdir(tmp_path)
    actor = WorkerActor("worker-tiny-0", ["worker", "--db", "x"], Path("/"), is_spread=False)
    assert actor.stop(7.0)
    assert started == [("worker-tiny-0", True, ["worker", "--db", "x"]), "start", "ask", 7.0]
    assert Path.cwd() == Path("/"), "paths are relative to the service's working directory"
