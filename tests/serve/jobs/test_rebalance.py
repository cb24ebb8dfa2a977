"""Jobs move to a worker with empty places once that pays, and then stay."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from weft.serve.db.engine import now
from weft.serve.db.tables import JOBS
from weft.serve.jobs.leases import renew
from weft.serve.jobs.rebalance import LOOK_S, REST_S, SETTLE_S, WORTH_S, Rebalance
from weft.serve.records.jobs import create_job
from weft.serve.records.workers import put_worker


@pytest.fixture
def tx(database):
    """One worker holds four jobs that still have long to go; the other has just come."""
    with database.begin() as opened:
        for worker in ("w1", "w2"):
            put_worker(opened, worker, base_model="tiny", address=None, token=None, info={"max_jobs": 8}, lease_s=1e6)
        for number in range(4):
            add(opened, worker="w1", status="running", estimated_finish=int(now(opened)) + 10_000 + number)
        yield opened


def add(tx, **columns):
    id = create_job(tx, "acme", model="tiny", training_file="file-x", settings={})["id"]
    lease = {"lease_until": now(tx) + 1e6} if "worker" in columns else {}
    tx.execute(sa.update(JOBS).where(JOBS.c.id == id).values(fence=1, **lease, **columns))
    return id


def chosen(tx, rebalance, at):
    return rebalance.choose(tx, "w1", "tiny", renew(tx, "w1", lease_s=1e6), at)


def settled(tx):
    """A rebalance that has seen unequal numbers for long enough, and the time."""
    rebalance, at = Rebalance(), now(tx)
    assert chosen(tx, rebalance, at) == []
    return rebalance, at + SETTLE_S


def test_jobs_when_another_worker_stays_empty_then_those_with_the_most_to_do_move_once(tx):
    rebalance, at = settled(tx)
    assert chosen(tx, Rebalance(), at) == [], "not at the first look"
    rows = sorted(renew(tx, "w1", lease_s=1e6), key=lambda row: -row["estimated_finish"])
    assert chosen(tx, rebalance, at) == [row["id"] for row in rows[:2]]
    rebalance.rest(at)
    assert chosen(tx, rebalance, at + REST_S - 1) == []
    assert chosen(tx, rebalance, at + REST_S) == [], "what is unequal then must first last again"


def test_jobs_when_the_numbers_were_equal_in_between_then_the_waiting_begins_anew(tx):
    rebalance, at = settled(tx)
    others = [add(tx, worker="w2", status="running") for _ in range(4)]
    assert chosen(tx, rebalance, at) == []
    tx.execute(sa.delete(JOBS).where(JOBS.c.id.in_(others)))
    assert chosen(tx, rebalance, at + LOOK_S) == []
    assert len(chosen(tx, rebalance, at + LOOK_S + SETTLE_S)) == 2


@pytest.mark.parametrize(
    "columns",
    [{"estimated_finish": None}, {"estimated_finish": WORTH_S / 2}, {"wanted": "pause"}, {"attempts": 2}],
    ids=lambda columns: next(iter(columns)),
)
def test_jobs_when_a_move_does_not_pay_or_may_harm_then_stay(tx, columns):
    """Those about to end, those whose user wants something, and those that may kill a worker."""
    rebalance, at = settled(tx)
    if columns.get("estimated_finish"):
        columns = {"estimated_finish": int(at + columns["estimated_finish"])}
    tx.execute(sa.update(JOBS).values(columns))
    assert chosen(tx, rebalance, at) == []


def test_jobs_when_others_wait_in_the_queue_then_stay(tx):
    rebalance, at = settled(tx)
    add(tx)
    assert chosen(tx, rebalance, at) == []
