"""Jobs go to workers in a fair order, to one worker at a time, and never for ever to one that has gone."""

from __future__ import annotations

import threading

import pytest
import sqlalchemy as sa

from weft.serve.db.engine import now
from weft.serve.db.jobs import create_job, move, request_change, update_job
from weft.serve.db.leases import MAX_ATTEMPTS, claim_jobs, give_up, has_free, release, renew, shorten_leases
from weft.serve.db.tables import EVENTS, JOBS, METADATA, USAGE, WORKERS
from weft.serve.db.tenants import create_tenant, update_tenant
from weft.serve.db.usage import EVALUATED, add_usage
from weft.serve.db.workers import put_worker
from weft.serve.errors import Fenced


@pytest.fixture
def database(bare):
    """An empty queue in a database of each kind."""
    METADATA.create_all(bare.engine)
    with bare.begin() as tx:
        for tenant in ("ash", "birch", "cedar"):
            create_tenant(tx, tenant)
    yield bare
    # The server is everybody's: the next one migrates from nothing.
    METADATA.drop_all(bare.engine)


@pytest.fixture
def tx(database):
    with database.begin() as opened:
        yield opened


def queue(tx, tenant="ash", **columns):
    id = create_job(tx, tenant, model=columns.pop("model", "tiny"), training_file="file-x", settings={})["id"]
    if columns:
        tx.execute(sa.update(JOBS).where(JOBS.c.id == id).values(columns))
    return id


def job(tx, id):
    return dict(tx.execute(sa.select(JOBS).where(JOBS.c.id == id)).mappings().one())


def claimed(tx, worker="w1", num_seats=10, **options):
    return [found["id"] for found in claim_jobs(tx, worker, "tiny", num_seats, **options)]


def expire(tx, *ids):
    tx.execute(sa.update(JOBS).where(JOBS.c.id.in_(ids)).values(lease_until=now(tx) - 1))


def alive(tx, *workers, max_jobs=10, **columns):
    for worker in workers:
        put_worker(tx, worker, base_model="tiny", address=None, token=None, info={"max_jobs": max_jobs}, **columns)


def test_claim_when_other_workers_are_alive_then_each_gets_an_equal_part(tx):
    """No GPU is idle because another worker looked first."""
    ids = [queue(tx) for _ in range(7)]
    alive(tx, "w1", "w2", "w3")
    assert claimed(tx, "w1") == ids[:3]
    assert claimed(tx, "w2") == ids[3:6]
    assert claimed(tx, "w1") == [], "the last one is the third worker's"
    assert claimed(tx, "w3") == ids[6:]
    more = [queue(tx) for _ in range(2)]
    assert claimed(tx, "w1") == []
    assert claimed(tx, "w3") == more


def test_claim_when_the_others_are_full_or_draining_or_silent_then_their_part_is_not_left_waiting(tx):
    ids = [queue(tx) for _ in range(6)]
    alive(tx, "w1", "w2", max_jobs=1)
    alive(tx, "w3", is_draining=True)
    alive(tx, "w4")
    tx.execute(sa.update(WORKERS).where(WORKERS.c.id == "w4").values(seen_at=now(tx) - 3600))
    assert claimed(tx, "w1", num_seats=8) == ids[:5]
    assert claimed(tx, "w2", num_seats=1) == ids[5:]


def test_claim_when_another_is_silent_beyond_its_own_lease_then_its_part_is_taken_at_once(tx):
    """A worker with a short lease is missed as soon as its jobs may be taken, and not later."""
    ids = [queue(tx) for _ in range(4)]
    alive(tx, "w1")
    alive(tx, "w2", lease_s=1.0)
    tx.execute(sa.update(WORKERS).where(WORKERS.c.id == "w2").values(seen_at=now(tx) - 2))
    assert claimed(tx, "w1") == ids


def test_claim_when_jobs_are_equal_then_first_come_is_first_served_up_to_the_room(tx):
    ids = [queue(tx) for _ in range(4)]
    assert has_free(tx, "tiny")
    assert claimed(tx, num_seats=3) == ids[:3]
    assert claimed(tx, "w2") == ids[3:]
    assert claimed(tx, "w3") == []
    assert not has_free(tx, "tiny")


def test_claim_when_taken_then_the_fence_rises_and_the_lease_is_by_the_database_clock(tx):
    id = queue(tx)
    before = now(tx)
    (found,) = claim_jobs(tx, "w1", "tiny", 1, lease_s=30)
    assert found["fence"] == 1
    assert found["worker"] == "w1"
    assert before + 29 < found["lease_until"] < before + 31
    assert job(tx, id) == found


def test_claim_when_another_backbone_is_meant_then_leaves_the_job(tx):
    queue(tx, model="large")
    assert claimed(tx) == []


def test_claim_when_priorities_differ_then_the_highest_goes_first(tx):
    low, high, middle = (queue(tx, priority=priority) for priority in (0, 5, 2))
    assert claimed(tx) == [high, middle, low]


def test_claim_when_one_tenant_has_many_jobs_then_tenants_take_turns(tx):
    many = [queue(tx, "ash") for _ in range(5)]
    few = [queue(tx, "birch"), queue(tx, "cedar")]
    assert claimed(tx, num_seats=4) == [many[0], few[0], few[1], many[1]]


def test_claim_when_a_tenant_has_had_fewer_tokens_per_weight_then_it_goes_first(tx):
    update_tenant(tx, "birch", weight=4.0)
    for tenant, tokens in (("ash", 1000), ("birch", 3000)):
        queue(tx, tenant, status="succeeded", trained_tokens=tokens, finished_at=int(now(tx)))
    ash, birch, cedar = (queue(tx, tenant) for tenant in ("ash", "birch", "cedar"))
    assert claimed(tx) == [cedar, birch, ash]


def test_claim_when_a_tenant_has_evaluated_much_lately_then_that_counts_as_a_third_of_training(tx):
    queue(tx, "birch", status="succeeded", trained_tokens=1000, finished_at=int(now(tx)))
    for tenant, tokens in (("ash", 3300), ("cedar", 2700)):
        add_usage(tx, tenant, f"ftjob-{tenant}:1", kind=EVALUATED, tokens=tokens)
    ash, birch, cedar = (queue(tx, tenant) for tenant in ("ash", "birch", "cedar"))
    assert claimed(tx, num_seats=1) == [cedar]
    tx.execute(sa.update(USAGE).values(created_at=int(now(tx)) - 7200))
    expire(tx, cedar)
    assert claimed(tx, "w2") == [ash, cedar, birch], "what was long ago does not count"


def test_claim_when_a_tenant_has_fewer_seats_then_it_goes_first_whatever_it_has_trained(tx):
    first, second = queue(tx, "ash"), queue(tx, "ash")
    assert claimed(tx, num_seats=1) == [first]
    queue(tx, "birch", status="succeeded", trained_tokens=10**9, finished_at=int(now(tx)))
    without_a_seat = queue(tx, "birch")
    assert claimed(tx, num_seats=2) == [without_a_seat, second]


def test_claim_when_what_a_tenant_had_is_long_ago_then_it_does_not_count(tx):
    queue(tx, "ash", status="succeeded", trained_tokens=10**9, finished_at=int(now(tx)) - 7200)
    ash, birch = queue(tx, "ash"), queue(tx, "birch")
    assert claimed(tx) == [ash, birch]


def test_claim_when_a_tenant_is_shut_out_then_its_jobs_wait(tx):
    id = queue(tx)
    update_tenant(tx, "ash", is_disabled=True)
    assert claimed(tx) == []
    update_tenant(tx, "ash", is_disabled=False)
    assert claimed(tx) == [id]


def test_claim_when_there_is_no_room_then_only_a_higher_priority_is_taken_and_only_once(tx):
    low = queue(tx)
    assert claimed(tx, num_seats=1) == [low]
    equal, high, higher = queue(tx, "birch"), queue(tx, "birch", priority=1), queue(tx, "birch", priority=2)
    assert claimed(tx, num_seats=0) == [higher]
    assert claimed(tx, num_seats=-1) == []
    assert {job(tx, id)["worker"] for id in (equal, high)} == {None}


def test_claim_when_a_lease_runs_out_then_another_takes_over_and_the_old_worker_is_fenced(tx):
    id = queue(tx)
    claimed(tx)
    move(tx, "ash", id, "running", fence=1)
    assert claimed(tx, "w2") == []
    expire(tx, id)
    assert claimed(tx, "w2") == [id]
    found = job(tx, id)
    assert (found["fence"], found["attempts"], found["status"]) == (2, 1, "running")
    with pytest.raises(Fenced):
        move(tx, "ash", id, "succeeded", fence=1)
    with pytest.raises(Fenced):
        update_job(tx, "ash", id, fence=1, trained_tokens=1)
    with pytest.raises(Fenced):
        release(tx, "ash", id, fence=1)
    assert job(tx, id) == found
    last = tx.execute(sa.select(EVENTS).order_by(EVENTS.c.seq.desc())).mappings().first()
    assert last["level"] == "warn" and "worker was lost" in last["message"]


def test_renew_when_the_lease_ran_out_and_no_worker_claimed_the_job_then_it_stays(tx):
    id = queue(tx)
    claimed(tx)
    expire(tx, id)
    assert [found["id"] for found in renew(tx, "w1", lease_s=30)] == [id]
    assert claimed(tx, "w2") == []


def test_leases_when_the_clock_is_set_back_then_they_last_no_longer_than_they_may(tx):
    """Those of a dead worker would last until the clock catches up; those that are as they should be stay so."""
    dead, quick, live = (queue(tx) for _ in range(3))
    alive(tx, "w2", lease_s=2.0)
    assert claimed(tx, "w1", num_seats=1) == [dead]
    assert claimed(tx, "w2", num_seats=1, lease_s=2) == [quick]
    assert claimed(tx, "w3", num_seats=1) == [live]
    shorten_leases(tx)
    until = job(tx, live)["lease_until"]
    tx.execute(sa.update(JOBS).where(JOBS.c.id != live).values(lease_until=now(tx) + 3600))
    tx.execute(sa.update(WORKERS).values(seen_at=now(tx) + 3600))
    shorten_leases(tx)
    lasts = [job(tx, id)["lease_until"] - now(tx) for id in (dead, quick)]
    assert 20 < lasts[0] <= 30 and 0 < lasts[1] <= 2
    assert job(tx, live)["lease_until"] == until
    assert tx.execute(sa.select(WORKERS.c.seen_at)).scalar_one() <= now(tx)


def test_renew_when_a_job_was_taken_over_then_it_is_not_among_those_held(tx):
    lost, kept = queue(tx), queue(tx)
    claimed(tx)
    expire(tx, lost)
    assert claimed(tx, "w2") == [lost]
    assert [found["id"] for found in renew(tx, "w1")] == [kept]
    assert job(tx, lost)["worker"] == "w2"


def test_release_when_a_job_goes_back_then_no_loss_is_counted(tx):
    started, waiting = queue(tx), queue(tx)
    claimed(tx)
    move(tx, "ash", started, "running", fence=1)
    for id in (started, waiting):
        release(tx, "ash", id, fence=1)
    assert claimed(tx, "w2") == [started, waiting]
    assert [job(tx, id)["attempts"] for id in (started, waiting)] == [0, 0]


def test_release_when_another_has_a_job_that_has_not_begun_then_fenced_and_it_stays_theirs(tx):
    id = queue(tx)
    claimed(tx)
    expire(tx, id)
    assert claimed(tx, "w2") == [id]
    with pytest.raises(Fenced):
        release(tx, "ash", id, fence=1)
    assert (job(tx, id)["status"], job(tx, id)["worker"]) == ("queued", "w2")


def test_claim_when_a_job_loses_its_worker_again_and_again_then_it_fails_and_others_do_not(tx):
    poison, beside = queue(tx), queue(tx, "birch")
    assert claimed(tx, "w1") == [poison, beside]
    give_up(tx, "w1")
    assert claimed(tx, "w2") == [poison, beside]
    give_up(tx, "w2")
    later = queue(tx, "cedar")
    # Two losses each: from now on half of the suspects train at a time.
    assert claimed(tx, "w3") == [poison]
    assert claimed(tx, "w3") == []
    give_up(tx, "w3")
    # The one with fewer losses goes first; the other has one more try, alone.
    assert claimed(tx, "w4") == [beside]
    assert claimed(tx, "w5") == [poison]
    give_up(tx, "w5")
    assert claimed(tx, "w6") == [later]
    failed = job(tx, poison)
    assert (failed["status"], failed["attempts"], failed["worker"]) == ("failed", MAX_ATTEMPTS, None)
    assert failed["error"]["code"] == "worker_lost"
    # It gets to a checkpoint, so it was not to blame, and the worker takes others again.
    update_job(tx, "birch", beside, fence=job(tx, beside)["fence"], attempts=0)
    another = queue(tx, "cedar")
    assert claimed(tx, "w4") == [another]


def test_claim_when_many_lose_two_workers_then_train_in_groups_and_only_the_one_to_blame_fails(tx):
    """Twenty jobs on one worker: the groups that live are free again, and of the one that dies each is tried alone."""
    ids = [queue(tx) for _ in range(20)]
    poison, losses = ids[3], 0
    for worker in ("w1", "w2"):
        assert claimed(tx, worker, num_seats=20) == ids
        give_up(tx, worker)
    groups = []
    for turn in range(40):
        group = claimed(tx, f"s{turn}", num_seats=20)
        if not group:
            break
        groups.append(len(group))
        if poison in group:
            losses += 1
            give_up(tx, f"s{turn}")
            continue
        for id in group:
            move(tx, "ash", id, "running", fence=job(tx, id)["fence"])
            move(tx, "ash", id, "succeeded", fence=job(tx, id)["fence"])
    assert losses == 2, "once in a group and once alone"
    assert [job(tx, id)["status"] for id in ids] == ["failed" if id == poison else "succeeded" for id in ids]
    assert groups[0] == 8 and max(groups) == 8 and groups[-8:] == [1] * 8
    assert len(groups) < 20, groups


def test_claim_when_a_suspect_waits_then_a_busy_worker_takes_no_others_until_it_is_alone(tx):
    busy = queue(tx)
    assert claimed(tx) == [busy]
    suspect, other = queue(tx, attempts=2), queue(tx)
    assert claimed(tx) == []
    move(tx, "ash", busy, "running", fence=1)
    move(tx, "ash", busy, "succeeded", fence=1)
    assert claimed(tx) == [suspect]
    assert job(tx, other)["worker"] is None


@pytest.mark.parametrize(("wish", "state"), [("cancel", "cancelled"), ("pause", "paused")])
def test_claim_when_the_worker_was_lost_before_it_applied_the_wish_then_it_is_granted(tx, wish, state):
    id = queue(tx)
    claimed(tx)
    move(tx, "ash", id, "running", fence=1)
    request_change(tx, "ash", id, wish)
    assert job(tx, id)["wanted"] == wish
    expire(tx, id)
    assert claimed(tx, "w2") == []
    found = job(tx, id)
    assert (found["status"], found["wanted"], found["worker"], found["fence"]) == (state, None, None, 2)


def test_claim_when_many_workers_try_at_once_then_every_job_goes_to_exactly_one(database):
    with database.begin() as tx:
        ids = {queue(tx, tenant) for tenant in ("ash", "birch", "cedar") for _ in range(20)}
    got: list[str] = []

    def work(name):
        while True:
            with database.begin() as tx:
                found = claimed(tx, name, num_seats=2)
            if not found:
                return
            got.extend(found)

    threads = [threading.Thread(target=work, args=(f"w{i}",)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 60
    assert set(got) == ids


def test_claim_when_the_worker_has_a_suspect_then_takes_no_others_until_that_gets_to_a_checkpoint(tx):
    suspect = queue(tx, attempts=2)
    assert claimed(tx) == [suspect]
    other = queue(tx)
    assert claimed(tx) == []
    update_job(tx, "ash", suspect, fence=1, attempts=0)
    assert claimed(tx) == [other]


def test_claim_when_there_is_no_room_then_equals_wait(tx):
    first = queue(tx, priority=1)
    assert claimed(tx, num_seats=1) == [first]
    equal = queue(tx, "birch", priority=1)
    assert claimed(tx, num_seats=0) == []
    assert job(tx, equal)["worker"] is None


def test_give_up_when_one_worker_goes_then_the_others_keep_their_jobs(tx):
    gone, kept = queue(tx), queue(tx)
    assert claimed(tx, "w1", num_seats=1) == [gone]
    assert claimed(tx, "w2", num_seats=1) == [kept]
    give_up(tx, "w1")
    assert claimed(tx, "w3") == [gone]
    assert job(tx, kept)["worker"] == "w2"


def test_claim_when_there_is_no_room_then_a_long_queue_is_not_read(tx, monkeypatch):
    """A full worker looks at what outranks its own, what was lost and what is to be cancelled, and at nothing else."""
    first = queue(tx, priority=1)
    assert claimed(tx, num_seats=1) == [first]
    for _ in range(30):
        queue(tx)
    urgent, doomed = queue(tx, priority=2), queue(tx, wanted="cancel")
    looked = []
    monkeypatch.setattr("weft.serve.db.leases._end_or_pause", lambda tx, job: looked.append(job["id"]))
    assert claimed(tx, num_seats=0) == [urgent]
    assert looked == [urgent, doomed]
