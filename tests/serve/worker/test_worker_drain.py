"""Jobs leave a worker that drains, is sent away, has too many or is too small, and go on elsewhere, bit for bit."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from small_model import small_model
from worker_bench import Bench, wait_until

from weft.serve.db import leases
from weft.serve.db.leases import steer_workers
from weft.serve.db.tables import JOBS
from weft.serve.db.workers import all_workers


@pytest.fixture
def bench(tmp_path):
    made = Bench.at(tmp_path, backbone=str(small_model()))
    yield made
    made.database.close()


def steer(bench, worker, wish):
    with bench.database.begin() as tx:
        steer_workers(tx, worker, wish)


def holders(bench):
    with bench.database.read() as tx:
        return list(tx.scalars(sa.select(JOBS.c.worker).order_by(JOBS.c.seq)))


def messages(bench, id):
    return [event["message"] for event in bench.events(id)]


def assert_as_alone(bench, *ids):
    """No bit differs, every step is reported once, and nothing counted as a loss."""
    for id in ids:
        adapter, tokens = bench.expected(id)
        job = bench.job(id)
        assert (bench.adapter(id), job["trained_tokens"], job["attempts"]) == (adapter, tokens, 0)
        steps = [event["data"]["step"] for event in bench.events(id, "metrics")]
        assert steps == list(range(1, job["total_steps"] + 1))


def test_job_when_its_worker_drains_then_goes_on_elsewhere_at_that_step_until_it_may_come_back(bench):
    id = bench.submit(max_steps=30, save_steps=1000)
    with bench.worker(id="worker-first", data_dir=bench.folder / "one"):
        bench.wait_for_step(id, 2)
        steer(bench, "worker-first", "drain")
        wait_until(lambda: holders(bench) == [None])
        left = bench.job(id)
        assert (left["status"], left["saved_step"]) == ("queued", left["step"])
        with bench.worker(id="worker-other", data_dir=bench.folder / "two"):
            bench.wait(id)
        assert f"Goes on from step {left['step']} of 30" in messages(bench, id)
        second = bench.submit(seed=8)
        assert holders(bench)[1] is None
        steer(bench, "worker-first", "undrain")
        bench.wait(second)
    assert_as_alone(bench, id, second)


def test_worker_when_sent_away_then_gives_its_jobs_back_and_ends(bench):
    id = bench.submit(max_steps=100_000, save_steps=1000)
    with bench.worker(id="worker-first") as worker:
        bench.wait_for_step(id, 2)
        steer(bench, "worker-first", "remove")
        wait_until(lambda: bench.job(id)["status"] == "queued")
        wait_until(lambda: worker.sync.is_dismissed)
    job = bench.job(id)
    assert (job["attempts"], job["saved_step"]) == (0, job["step"])
    with bench.database.read() as tx:
        assert all_workers(tx) == []


def test_jobs_when_a_worker_comes_later_then_it_gets_its_part_and_no_bit_changes(bench, monkeypatch):
    """A new machine takes load from a full one; nothing comes back."""
    monkeypatch.setattr(leases, "LOOK_S", 0.05)
    monkeypatch.setattr(leases, "STABLE_S", 0.2)
    monkeypatch.setattr(leases, "WORTH_S", 0.0)
    ids = [bench.submit("ash", seed=seed, max_steps=40, save_steps=1000) for seed in range(2)]
    with bench.worker(id="worker-first", data_dir=bench.folder / "one"):
        for id in ids:
            bench.wait_for_step(id, 2)
        with bench.worker(id="worker-later", data_dir=bench.folder / "two"):
            wait_until(lambda: "worker-later" in holders(bench))
            bench.wait(*ids)
    moved = [id for id in ids if any("Another worker has more room" in text for text in messages(bench, id))]
    assert len(moved) == 1
    assert_as_alone(bench, *ids)


def test_job_when_another_tenant_holds_all_seats_then_gets_one_and_no_bit_of_any_changes(bench, monkeypatch):
    monkeypatch.setattr(leases, "LOOK_S", 0.05)
    monkeypatch.setattr(leases, "STABLE_S", 0.2)
    monkeypatch.setattr(leases, "WORTH_S", 0.0)
    long = [bench.submit("ash", seed=seed, max_steps=40, save_steps=1000) for seed in range(2)]
    with bench.worker(max_jobs=2):
        for id in long:
            bench.wait_for_step(id, 2)
        short = bench.submit("birch", seed=9, max_steps=4)
        bench.wait(short)
        assert [bench.job(id)["status"] for id in long] != ["succeeded"] * 2
        bench.wait(*long)
    assert sum("It is another tenant's turn" in text for id in long for text in messages(bench, id)) == 1
    assert_as_alone(bench, short, *long)


@pytest.mark.parametrize("small", [{"capacity": 40}, {"job_memory": 1}], ids=["too long", "too large"])
def test_job_when_it_does_not_fit_one_worker_then_another_that_is_alive_trains_it(bench, small):
    with bench.worker(id="worker-small", **small):
        with bench.worker(id="worker-large", data_dir=bench.folder / "two") as large:
            wait_until(lambda: large.sync.num_claims == 0 and len(rows(bench)) == 2)
            ids = [bench.submit(seed=seed) for seed in range(2)]
            bench.wait(*ids)
        assert_as_alone(bench, *ids)
        alone = bench.submit(seed=3)
        (job,) = bench.wait(alone)
    assert job["status"] == "failed" and job["error"]["code"] != "server_error", "no live worker can hold it"


def rows(bench):
    with bench.database.read() as tx:
        return all_workers(tx)
