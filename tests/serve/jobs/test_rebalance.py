"""Jobs move to a worker with empty places once that pays, and then stay."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from weft.plan.admit import QUANTUM_TOKENS
from weft.serve.db.engine import now
from weft.serve.db.jobs import create_job
from weft.serve.db.leases import LOOK_S, REST_S, STABLE_S, WORTH_S, Rebalance, SeatShares, claim_jobs, release, renew
from weft.serve.db.tables import JOBS
from weft.serve.db.tenants import create_tenant, update_tenant
from weft.serve.db.workers import put_worker


@pytest.fixture
def tx(database):
    """One worker holds four jobs that still have long to go; the other has just come."""
    with database.begin() as opened:
        for worker in ("w1", "w2"):
            put_worker(opened, worker, base_model="tiny", address=None, token=None, info={"max_jobs": 8}, lease_s=1e6)
        for number in range(4):
            add(opened, worker="w1", status="running", estimated_finish=int(now(opened)) + 10_000 + number)
        yield opened


def add(tx, tenant="acme", **columns):
    id = create_job(tx, tenant, model="tiny", training_file="file-x", settings={})["id"]
    lease = {"lease_until": now(tx) + 1e6} if "worker" in columns else {}
    tx.execute(sa.update(JOBS).where(JOBS.c.id == id).values(fence=1, **lease, **columns))
    return id


def chosen(tx, rebalance, at):
    return rebalance.choose(tx, "w1", "tiny", renew(tx, "w1", lease_s=1e6), at)


def after_waiting(tx):
    """A rebalance that has seen unequal numbers for long enough, and the time."""
    rebalance, at = Rebalance(), now(tx)
    assert chosen(tx, rebalance, at) == []
    return rebalance, at + STABLE_S


def test_jobs_when_another_worker_stays_empty_then_those_with_the_most_to_do_move_once(tx):
    rebalance, at = after_waiting(tx)
    assert chosen(tx, Rebalance(), at) == [], "not at the first look"
    rows = sorted(renew(tx, "w1", lease_s=1e6), key=lambda row: -row["estimated_finish"])
    assert chosen(tx, rebalance, at) == [row["id"] for row in rows[:2]]
    rebalance.rest(at)
    assert chosen(tx, rebalance, at + REST_S - 1) == []
    assert chosen(tx, rebalance, at + REST_S) == [], "what is unequal then must first last again"


def test_jobs_when_the_clock_is_set_back_then_the_numbers_must_be_unequal_for_no_longer(tx):
    rebalance, at = after_waiting(tx)
    back = at - 3600
    assert chosen(tx, rebalance, back) == []
    assert len(chosen(tx, rebalance, back + STABLE_S)) == 2
    rebalance.rest(at)
    assert chosen(tx, rebalance, back) == []
    assert len(chosen(tx, rebalance, back + STABLE_S)) == 2


def test_jobs_when_the_numbers_were_equal_in_between_then_the_waiting_begins_again(tx):
    rebalance, at = after_waiting(tx)
    others = [add(tx, worker="w2", status="running") for _ in range(4)]
    assert chosen(tx, rebalance, at) == []
    tx.execute(sa.delete(JOBS).where(JOBS.c.id.in_(others)))
    assert chosen(tx, rebalance, at + LOOK_S) == []
    assert len(chosen(tx, rebalance, at + LOOK_S + STABLE_S)) == 2


@pytest.mark.parametrize(
    "columns",
    [{"estimated_finish": None}, {"estimated_finish": WORTH_S / 2}, {"wanted": "pause"}, {"attempts": 2}],
    ids=lambda columns: next(iter(columns)),
)
def test_jobs_when_a_move_does_not_pay_or_may_harm_then_stay(tx, columns):
    """Those about to end, those whose user wants something, and those that may kill a worker."""
    rebalance, at = after_waiting(tx)
    if columns.get("estimated_finish"):
        columns = {"estimated_finish": int(at + columns["estimated_finish"])}
    tx.execute(sa.update(JOBS).values(columns))
    assert chosen(tx, rebalance, at) == []


def test_jobs_when_others_wait_in_the_queue_then_stay(tx):
    rebalance, at = after_waiting(tx)
    add(tx)
    assert chosen(tx, rebalance, at) == []


@pytest.fixture
def full(database):
    """One worker, whose eight seats a tenant holds; each of its jobs has had a million tokens."""
    with database.begin() as opened:
        put_worker(opened, "w1", base_model="tiny", address=None, token=None, info={"max_jobs": 8}, lease_s=1e6)
        ids = [
            add(
                opened,
                worker="w1",
                status="running",
                estimated_finish=int(now(opened)) + 10_000,
                trained_tokens=QUANTUM_TOKENS,
            )
            for _ in range(8)
        ]
        yield opened, ids


def making_way(tx):
    """The jobs that make way once the shares have been unequal for long enough."""
    seats, at = SeatShares(), now(tx)
    assert chosen(tx, seats, at) == [], "not at the first look"
    return chosen(tx, seats, at + STABLE_S)


@pytest.mark.parametrize(
    ("weight", "num_waiting", "num_given"), [(1.0, 1, 1), (1.0, 9, 4), (3.0, 9, 6), (1 / 3, 9, 2), (1.0, 0, 0)]
)
def test_jobs_when_a_tenant_below_its_share_waits_then_as_many_make_way_as_its_weight_is_worth(
    full, weight, num_waiting, num_given
):
    tx, ids = full
    update_tenant(tx, "globex", weight=weight)
    waiting = [add(tx, tenant="globex") for _ in range(num_waiting)]
    given = making_way(tx)
    assert given == ids[::-1][:num_given], "those that came last"
    for id in given:
        release(tx, "acme", id, fence=1)
    taken = [job["id"] for job in claim_jobs(tx, "w1", "tiny", len(given), lease_s=1e6)]
    assert taken == waiting[:num_given]
    tx.execute(sa.update(JOBS).where(JOBS.c.id.in_(taken)).values(status="running", estimated_finish=2**40))
    assert making_way(tx) == [], "no seat changes back"


def test_jobs_when_their_own_tenant_or_a_lower_priority_waits_then_keep_their_seats(full):
    tx, ids = full
    add(tx)
    tx.execute(sa.update(JOBS).where(JOBS.c.id.in_(ids)).values(priority=1))
    add(tx, tenant="globex")
    assert making_way(tx) == []
    add(tx, tenant="globex", priority=1)
    assert making_way(tx) == [ids[-1]]


def test_jobs_when_seats_are_free_or_the_waiting_one_does_not_fit_then_keep_theirs(full):
    tx, _ = full
    add(tx, tenant="globex", min_job_bytes=100)
    info = {"max_jobs": 8, "job_bytes": 99}
    put_worker(tx, "w1", base_model="tiny", address=None, token=None, info=info, lease_s=1e6)
    assert making_way(tx) == []
    put_worker(tx, "w1", base_model="tiny", address=None, token=None, info={"max_jobs": 9}, lease_s=1e6)
    assert making_way(tx) == []


def test_jobs_when_there_are_more_tenants_than_seats_then_the_one_with_most_tokens_makes_way(full):
    tx, ids = full
    for number, id in enumerate(ids):
        create_tenant(tx, f"t{number}")
        tx.execute(
            sa.update(JOBS).where(JOBS.c.id == id).values(tenant=f"t{number}", trained_tokens=number * QUANTUM_TOKENS)
        )
    add(tx, tenant="globex", trained_tokens=6 * QUANTUM_TOKENS)
    assert making_way(tx) == [ids[-1]], "it has had a quantum more"
    tx.execute(sa.update(JOBS).where(JOBS.c.id == ids[-1]).values(trained_tokens=7 * QUANTUM_TOKENS - 1))
    assert making_way(tx) == []
