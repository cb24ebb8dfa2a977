"""A node of the cluster that a service has its workers on is lost: its jobs go on elsewhere, once each."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sent_jobs import TENANTS, SentJobs
from service_process import Service, Wish, train, wait

from weft.parallel.ray.connect import need_ray
from weft.serve.db.engine import open_database
from weft.serve.db.tables import EVENTS, JOBS, WORKERS

pytestmark = [pytest.mark.slow, pytest.mark.faults]
WISHES = [Wish(f"wish{i}", seed=i, max_steps=30 + 5 * i, batch_size=2 + i, save_steps=5) for i in range(3)]
NUM_JOBS = 12


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Two nodes on this machine with room for one worker each; the second one can be lost."""
    need_ray()
    from ray.cluster_utils import Cluster

    settings = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    found = Cluster(initialize_head=True, head_node_args={**settings, "include_dashboard": False})
    found.spare = found.add_node(**settings)
    yield found
    found.shutdown()


def processes_on(node: Any) -> list[int]:
    """All that runs on a node: what its raylet has started, and what that has."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = {process.process.pid for kind in node.all_processes.values() for process in kind}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found)


def lose(cluster: Any) -> None:
    """The spare node is gone from one moment to the next, with no process left to give anything back."""
    for pid in processes_on(cluster.spare):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    cluster.remove_node(cluster.spare, allow_graceful=False)


def test_jobs_when_a_node_of_the_cluster_is_lost_then_they_go_on_elsewhere_once_each(cluster, tmp_path):
    service = Service(tmp_path / "data", ("--cluster", cluster.address, "--workers", "2"))
    for tenant in TENANTS:
        service.add_tenant(tenant)
    database = open_database(f"sqlite:///{service.data_dir / 'weft.db'}")
    jobs = SentJobs(service, database, WISHES, NUM_JOBS)

    def num_workers() -> int:
        with database.read() as tx:
            return int(tx.execute(sa.select(sa.func.count()).select_from(WORKERS)).scalar_one())

    def holders() -> set[str]:
        with database.read() as tx:
            held = sa.select(JOBS.c.worker).where(JOBS.c.status == "running", JOBS.c.step > 0).distinct()
            return set(tx.execute(held).scalars())

    service.start()
    try:
        wait(lambda: num_workers() == 2)
        for number in range(NUM_JOBS):
            jobs.send(number)
        wait(lambda: len(holders()) == 2)
        lose(cluster)
        wait(jobs.are_over)
        jobs.assert_each_ended_once(train(WISHES, tmp_path / "twins"))
        with database.read() as tx:
            takeovers = tx.execute(sa.select(EVENTS.c.message).where(EVENTS.c.message.contains("another takes over")))
            assert takeovers.all(), "the node had jobs when it was lost"
    finally:
        service.stop()
        database.close()
