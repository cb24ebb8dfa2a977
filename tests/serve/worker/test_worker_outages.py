"""The database goes away while jobs train, and a real `weft worker` process comes and goes: nothing is lost."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sqlite3
import subprocess
import sys
import time

import pytest
from postgres_server import POSTGRES, running_postgres
from small_model import small_model
from worker_bench import CAPACITY, PATIENCE_S, Bench, wait_until

from weft.serve.blobs import Blobs
from weft.serve.db.engine import migrate, open_database
from weft.serve.db.workers import live_workers

pytestmark = pytest.mark.faults


@pytest.fixture(params=["sqlite", *POSTGRES])
def outage(request, tmp_path):
    """A bench, and a way to take its database away for a while; the server is its own, for others must not notice."""
    with contextlib.ExitStack() as stack:
        if request.param == "sqlite":
            url, take_away = f"sqlite:///{tmp_path}/weft.db", functools.partial(lock, tmp_path / "weft.db")
        else:
            server = stack.enter_context(running_postgres())
            url, take_away = server.url, functools.partial(restart, server)
        database, blobs = open_database(url, lock_wait_s=0.3), Blobs(str(tmp_path / "blobs"))
        bench = Bench(tmp_path, database, blobs, str(small_model()))
        stack.callback(bench.database.close)
        migrate(bench.database)
        yield bench, take_away


def lock(path, until):
    other = sqlite3.connect(path, isolation_level=None, timeout=10)
    other.execute("BEGIN EXCLUSIVE")
    time.sleep(1.5)
    wait_until(until)
    other.execute("ROLLBACK")
    other.close()


def restart(server, until):
    server.stop("immediate")
    time.sleep(1.0)
    wait_until(until)
    server.start()


def test_worker_when_the_database_goes_away_then_training_goes_on_and_nothing_is_lost_or_doubled(outage):
    bench, take_away = outage
    ids = [bench.submit(tenant, max_steps=20, save_steps=7) for tenant in ("ash", "birch")]
    with bench.worker() as worker:
        bench.wait_for_step(ids[0], 2)
        (job, *_) = worker.engine.jobs.values()
        before = job.step
        # It comes back only once training has gone on without it.
        take_away(lambda: job.step > before)
        bench.wait(*ids)
    for id in ids:
        adapter, tokens = bench.expected(id)
        assert bench.adapter(id) == adapter
        assert bench.job(id)["trained_tokens"] == tokens
        steps = [event["data"]["step"] for event in bench.events(id, "metrics")]
        assert steps == list(range(1, 21))


@pytest.fixture
def bench(tmp_path):
    database, blobs = open_database(f"sqlite:///{tmp_path}/weft.db"), Blobs(str(tmp_path / "blobs"))
    made = Bench(tmp_path, database, blobs, str(small_model()))
    migrate(made.database)
    yield made
    made.database.close()


def weft_worker(bench, *options):
    command = [
        sys.executable, "-m", "weft", "worker", "--data-dir", str(bench.folder), "--capacity", str(CAPACITY),
        "--base-model", f"tiny={bench.backbone}", "--device", "cpu", "--pulse", "0.1", "--lease", "2", *options,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)


def test_weft_worker_when_run_then_trains_and_leaves_on_request(bench):
    id, long = bench.submit(), bench.submit("ash", max_steps=100_000, save_steps=100_000)
    process = weft_worker(bench)
    bench.wait(id)
    bench.wait_for_step(long, 2)
    process.send_signal(signal.SIGTERM)
    # A supervisor that ends sends another at once; that is no hurry.
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, log
    assert bench.adapter(id) == bench.expected(id)[0]
    job = bench.job(long)
    assert (job["status"], job["worker"], job["attempts"]) == ("queued", None, 0)
    assert job["trained_tokens"] > 0
    with bench.database.read() as tx:
        assert live_workers(tx) == []
    assert '"message": "ready"' in log
    assert "Traceback" not in log
