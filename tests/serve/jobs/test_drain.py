"""An operator drains, undrains and removes workers by their id or by their machine."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from weft.serve.db.engine import now
from weft.serve.db.jobs import create_job
from weft.serve.db.leases import claim_jobs, steer_workers
from weft.serve.db.tables import JOBS, WORKERS
from weft.serve.db.workers import all_workers, forget_lost_workers, held_by_worker, put_worker, worker_state
from weft.serve.errors import NotFound, NotPossible


@pytest.fixture
def tx(database):
    with database.begin() as opened:
        for worker, machine in (("worker-aaaaaa", "loom-1"), ("worker-bbbbbb", "loom-1"), ("worker-cccccc", "loom-2")):
            put(opened, worker, machine)
        yield opened


def put(tx, worker, machine, **columns):
    put_worker(tx, worker, base_model="tiny", address=None, token=None, info={}, machine=machine, **columns)


def silence(tx, worker):
    tx.execute(sa.update(WORKERS).where(WORKERS.c.id == worker).values(seen_at=now(tx) - 3600))


def states(tx):
    held, at = held_by_worker(tx), now(tx)
    return {row["id"][-6:]: worker_state(row, held.get(row["id"], 0), at) for row in all_workers(tx)}


def test_drain_when_a_machine_is_named_then_all_its_workers_drain_until_undrained(tx):
    assert [row["id"] for row in steer_workers(tx, "loom-1", "drain")] == ["worker-aaaaaa", "worker-bbbbbb"]
    create_job(tx, "acme", model="tiny", training_file="file-x", settings={})
    claim_jobs(tx, "worker-aaaaaa", "tiny", 1)
    assert states(tx) == {"aaaaaa": "draining", "bbbbbb": "drained", "cccccc": "alive"}
    put(tx, "worker-aaaaaa", "loom-1", is_draining=True)
    assert states(tx)["aaaaaa"] == "draining", "a sign of life does not undo it"
    steer_workers(tx, "aaaaaa", "undrain")
    put(tx, "worker-aaaaaa", "loom-1")
    assert states(tx) == {"aaaaaa": "alive", "bbbbbb": "drained", "cccccc": "alive"}


def test_remove_when_requested_then_the_worker_leaves_and_no_later_wish_keeps_it(tx):
    steer_workers(tx, "worker-cccccc", "remove")
    steer_workers(tx, "loom-2", "undrain")
    assert states(tx)["cccccc"] == "leaving"


def test_remove_when_the_worker_is_lost_then_it_is_forgotten_and_its_jobs_are_free_at_once(tx):
    job = create_job(tx, "acme", model="tiny", training_file="file-x", settings={})["id"]
    claim_jobs(tx, "worker-cccccc", "tiny", 1)
    silence(tx, "worker-cccccc")
    assert states(tx)["cccccc"] == "lost"
    with pytest.raises(NotPossible, match="loom-2 is lost: it has nothing to drain, but it can be removed"):
        steer_workers(tx, "loom-2", "drain")
    steer_workers(tx, "loom-2", "remove")
    assert "cccccc" not in states(tx)
    assert [row["id"] for row in claim_jobs(tx, "worker-aaaaaa", "tiny", 1)] == [job]
    assert tx.execute(sa.select(JOBS.c.attempts)).scalar_one() == 1, "it was lost, not given back"


def test_rows_when_workers_were_lost_a_day_ago_then_are_forgotten_and_no_others(tx):
    silence(tx, "worker-bbbbbb")
    tx.execute(sa.update(WORKERS).where(WORKERS.c.id == "worker-cccccc").values(seen_at=now(tx) - 25 * 3600))
    forget_lost_workers(tx)
    assert states(tx) == {"aaaaaa": "alive", "bbbbbb": "lost"}


@pytest.mark.parametrize("target", ["loom-3", "worker-dddddd", "aaa", ""])
def test_drain_when_there_is_no_such_worker_then_one_sentence_names_those_there_are(tx, target):
    with pytest.raises(NotFound, match=r"there is no worker or machine '.*'; there are loom-1, loom-2, worker-aaaaaa"):
        steer_workers(tx, target, "drain")
