"""Unconfirmed commits, deadlocks, a file store that is away, a worker that is gone: no job suffers from them."""

from __future__ import annotations

import errno
import random
import shutil
import threading
import time

import pytest
import sqlalchemy as sa
from postgres_server import POSTGRES
from small_model import small_model
from worker_bench import PATIENCE_S, Bench

import weft.serve.worker.claims
from weft.engine.execute.optimizers.adamw import AdamW
from weft.serve.blobs import Blobs
from weft.serve.db.engine import migrate
from weft.serve.db.files import delete_file
from weft.serve.db.leases import claim_jobs
from weft.serve.db.tables import JOBS, WORKERS
from weft.serve.db.workers import put_worker
from weft.serve.worker.directory import WorkDirectory

pytestmark = [pytest.mark.faults]
on_postgres = pytest.mark.parametrize("kind", POSTGRES, indirect=True)


@pytest.fixture
def bench(tmp_path):
    made = Bench.at(tmp_path, backbone=str(small_model()))
    yield made
    made.database.close()


@pytest.fixture
def pg_bench(bare, tmp_path):
    migrate(bare)
    return Bench(tmp_path, bare, Blobs(str(tmp_path / "blobs")))


def wait(until, timeout=PATIENCE_S):
    deadline = time.monotonic() + timeout
    while not until():
        assert time.monotonic() < deadline, "timed out while waiting"
        time.sleep(0.01)


@on_postgres
def test_worker_when_its_commits_are_not_confirmed_then_all_is_written_once_and_every_blob_is_there(
    pg_bench, monkeypatch
):
    bench = pg_bench
    dialect = bench.database.engine.dialect
    commit, rng, unheard = dialect.do_commit, random.Random(3), []

    def deaf(connection):
        """Most commits of the database thread happen, and the connection breaks before the answer."""
        commit(connection)
        if threading.current_thread().name == "weft-database-sync" and rng.random() < 0.7:
            unheard.append(connection)
            connection.dbapi_connection.close()
            connection.execute("SELECT 1")

    monkeypatch.setattr(dialect, "do_commit", deaf)
    id = bench.submit(max_steps=5, save_steps=1)
    paused = bench.submit("ash", max_steps=4000, save_steps=4000)
    with bench.worker() as worker:
        (job,) = bench.wait(id)
        bench.wait_for_step(paused, 1)
        bench.request(paused, "pause")
        bench.wait(paused, until=("paused",))
        wait(lambda: not worker.engine.jobs)
    assert len(unheard) > 2
    monkeypatch.undo()
    adapter, tokens = bench.expected(id)
    assert bench.adapter(id) == adapter
    assert (job["trained_tokens"], job["attempts"], job["fence"]) == (tokens, 0, 1)
    assert [event["message"].split(":")[0] for event in bench.events(id)] == [
        "Created fine-tuning job",
        "Validating training file",
        "Files validated, moving job to queued state",
        "Fine-tuning job started",
        *(f"Step {step}/5" for step in range(1, 6)),
        "The job has successfully completed",
    ]
    assert bench.stored_blobs() == bench.named_blobs()
    with bench.database.read() as tx:
        assert tx.execute(sa.select(WORKERS)).all() == []


@on_postgres
def test_worker_when_its_transaction_ends_a_deadlock_then_it_goes_on(pg_bench):
    bench = pg_bench
    id = bench.submit(max_steps=4000, save_steps=4000)
    with bench.worker() as worker:
        bench.wait_for_step(id, 1)
        with bench.database.begin() as tx:
            # The database thread holds the job and wants its own row; we hold that and want the job.
            tx.exec_driver_sql("SET LOCAL deadlock_timeout = '30s'")
            tx.execute(sa.select(WORKERS.c.id).with_for_update())
            waiting = sa.text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
            wait(lambda: tx.execute(waiting).scalar_one() > 0)
            tx.execute(sa.select(JOBS.c.id).where(JOBS.c.id == id).with_for_update())
        before = bench.job(id)["step"]
        bench.wait_for_step(id, before + 1)
        assert worker.sync.crash is None
        bench.request(id, "cancel")
        bench.wait(id)
    assert bench.job(id)["fence"] == 1


def test_job_when_it_is_the_workers_by_another_claim_then_that_is_the_one_it_goes_on_with(bench):
    id = bench.submit(max_steps=3000, save_steps=2)
    with bench.worker() as worker:
        bench.wait_for_step(id, 3)
        bench.set(id, fence=9)
        wait(lambda: list(worker.engine.jobs) == [f"{id}.9"])
        bench.wait_for_step(id, bench.job(id)["step"] + 2)
        bench.request(id, "cancel")
        (job,) = bench.wait(id)
    assert job["fence"] == 9
    steps = [event["data"]["step"] for event in bench.events(id, "metrics")]
    assert steps == list(range(1, len(steps) + 1)), "every step is reported once"
    assert bench.stored_blobs() == bench.named_blobs()


def test_jobs_when_the_file_store_is_away_then_the_ended_one_waits_and_the_others_go_on(bench):
    ended = bench.submit(max_steps=24, save_steps=6)
    other = bench.submit("ash", max_steps=4000, save_steps=5)
    blobs, away = bench.folder / "blobs", bench.folder / "away"
    with bench.worker(lease_s=0.9) as worker:
        bench.wait_for_step(ended, 1)
        bench.wait_for_step(other, 1)
        blobs.rename(away)
        wait(lambda: f"{ended}.1" not in worker.engine.jobs)
        bench.wait_for_step(other, bench.job(other)["step"] + 10)
        bench.request(other, "cancel")
        bench.wait(other)
        held_until = bench.job(ended)["lease_until"]
        wait(lambda: bench.job(ended)["lease_until"] > held_until)
        assert bench.job(ended)["status"] == "running"
        away.rename(blobs)
        (job,) = bench.wait(ended)
    assert (job["attempts"], job["fence"]) == (0, 1)
    assert bench.adapter(ended) == bench.expected(ended)[0]
    assert bench.stored_blobs() == bench.named_blobs()


def test_worker_when_stopped_while_the_file_store_is_away_then_the_ended_job_goes_to_the_next(bench):
    id = bench.submit(max_steps=24, save_steps=1000)
    blobs, away = bench.folder / "blobs", bench.folder / "away"
    with bench.worker() as worker:
        bench.wait_for_step(id, 1)
        blobs.rename(away)
        wait(lambda: not worker.engine.jobs)
    job = bench.job(id)
    assert (job["status"], job["worker"], job["attempts"]) == ("queued", None, 0)
    away.rename(blobs)
    with bench.worker():
        bench.wait(id)
    adapter, tokens = bench.expected(id)
    assert bench.adapter(id) == adapter
    assert bench.job(id)["trained_tokens"] == tokens
    steps = [event["data"]["step"] for event in bench.events(id, "metrics")]
    assert steps == list(range(1, 25)), "also the steps of which the first had no time to be reported"


def test_job_when_its_file_is_deleted_after_it_began_then_the_next_worker_goes_on(bench):
    id = bench.submit(max_steps=24, save_steps=1000)
    with bench.worker():
        bench.wait_for_step(id, 2)
    assert bench.job(id)["status"] == "queued"
    with bench.database.begin() as tx:
        delete_file(tx, "default", bench.job(id)["training_file"])
    with bench.worker():
        bench.wait(id)
    assert bench.adapter(id) == bench.expected(id)[0]


def test_job_when_the_disk_is_full_while_its_data_is_fetched_then_goes_back_and_is_tried_again(bench, monkeypatch):
    copy, full = shutil.copyfileobj, [OSError(errno.ENOSPC, "No space left on device")]

    def unlucky(*arguments):
        if threading.current_thread().name == "weft-prepare" and full:
            raise full.pop()
        return copy(*arguments)

    monkeypatch.setattr(shutil, "copyfileobj", unlucky)
    monkeypatch.setattr(weft.serve.worker.claims, "RETRY_S", 0.3)
    id = bench.submit(max_steps=3)
    with bench.worker():
        (job,) = bench.wait(id)
    assert full == []
    assert (job["status"], job["fence"], job["attempts"]) == ("succeeded", 2, 0)


@pytest.mark.parametrize("is_gone", [True, False])
def test_worker_when_another_here_is_gone_then_its_jobs_are_taken_before_their_leases_run_out(bench, is_gone):
    id = bench.submit(max_steps=3)
    directory = WorkDirectory(bench.folder / "data", "worker-other", "tiny")
    with bench.database.begin() as tx:
        claim_jobs(tx, "worker-other", "tiny", 1, lease_s=3600)
        put_worker(tx, "worker-other", base_model="tiny", address=None, token=None, info={})
    if is_gone:
        directory.close()
    with bench.worker() as worker:
        if is_gone:
            bench.wait(id)
        else:
            second = bench.submit("ash", max_steps=3)
            bench.wait(second)
            assert worker.sync.num_claims == 1
    job = bench.job(id)
    assert (job["attempts"], job["fence"]) == ((0, 2) if is_gone else (0, 1))
    assert sum("The worker was lost" in event["message"] for event in bench.events(id)) == is_gone
    with bench.database.read() as tx:
        assert [row.id for row in tx.execute(sa.select(WORKERS))] == ([] if is_gone else ["worker-other"])
    if not is_gone:
        directory.close()


def test_job_when_it_raises_in_its_step_then_it_alone_fails_and_the_worker_lives(bench, monkeypatch):
    """Its owner learns that it was our mistake, and nothing about the internals."""
    step = AdamW.step

    def breaks(optimizer, is_finite):
        if optimizer.spec.seed == 666:
            raise RuntimeError("value cannot be converted to type float without overflow")
        return step(optimizer, is_finite)

    monkeypatch.setattr(AdamW, "step", breaks)
    bad, good = bench.submit("ash", seed=666), bench.submit()
    with bench.worker() as worker:
        failed, done = bench.wait(bad, good)
        assert worker.sync.crash is None
    assert (failed["status"], failed["error"]["code"], failed["attempts"]) == ("failed", "server_error", 0)
    assert "internal error" in failed["error"]["message"] and "float" not in failed["error"]["message"]
    assert done["attempts"] == 0
    monkeypatch.undo()
    assert bench.adapter(good) == bench.expected(good)[0]
