"""Workers are killed, stopped and made to leave at any moment: every job ends once, with the bytes of a quiet run."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa
from postgres_server import POSTGRES, running_postgres
from worker_bench import PATIENCE_S, Bench
from worker_processes import bench_at

from weft.serve.db.tables import METADATA, MODELS, WORKERS
from weft.serve.worker.database_sync import STUCK

STOPPED = ("stopped-checkpoint", "stopped-result", "stopped-metrics")
SCRIPT = Path(__file__).parent / "worker_processes.py"
pytestmark = [pytest.mark.faults, pytest.mark.slow]


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """All plays, their benches and jobs: one process imports everything once."""
    folder = tmp_path_factory.mktemp("workers")
    jobs = {
        "killed": [
            {"tenant": "ash", "seed": 1, "max_steps": 30, "save_steps": 1},
            {"tenant": "birch", "seed": 2, "max_steps": 30, "save_steps": 1},
            {"tenant": "cedar", "seed": 3, "max_steps": 20, "save_steps": 3, "save_total_limit": 1},
        ],
        "drained": [{"tenant": tenant, "max_steps": 30, "save_steps": 1000} for tenant in ("ash", "birch")],
        "poisoned": [{"tenant": tenant, "max_steps": 3, "save_steps": 1} for tenant in ("ash", "birch")]
        + [{"tenant": "cedar", "seed": 666}],
    }
    if POSTGRES:
        jobs["killed-of-two"] = [
            {"tenant": tenant, "seed": seed, "max_steps": 12, "save_steps": 1}
            for tenant in ("ash", "birch")
            for seed in range(3)
        ]
    for name in (*STOPPED, "hung"):
        jobs[name] = [{"tenant": tenant, "max_steps": 5, "save_steps": 1} for tenant in ("ash", "birch")]
    benches, ids = {}, {}
    stack = contextlib.ExitStack()
    for name, wanted in jobs.items():
        (folder / name).mkdir()
        if name == "killed-of-two":
            # A server of its own: other tests empty the one they share.
            (folder / name / "database-url").write_text(stack.enter_context(running_postgres()).url)
        benches[name] = bench_at(folder / name)
        stack.callback(benches[name].database.close)
        METADATA.create_all(benches[name].database.engine)
        ids[name] = [benches[name].submit(**job) for job in wanted]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), str(folder)]
    finished = subprocess.run(
        command, capture_output=True, text=True, timeout=6 * PATIENCE_S, check=False, env=one_thread
    )
    assert finished.returncode == 0, finished.stderr
    report = json.loads(finished.stdout)
    print(report)
    with stack:
        yield {name: (benches[name], ids[name], report[name]) for name in jobs}


def assert_as_if_quiet(bench: Bench, *ids: str) -> None:
    for id in ids:
        adapter, tokens = bench.expected(id)
        assert bench.adapter(id) == adapter
        job = bench.job(id)
        assert job["trained_tokens"] == tokens
        report = [event["data"]["step"] for event in bench.events(id, "metrics") if "train_loss" in event["data"]]
        assert report == list(range(1, job["total_steps"] + 1)), "every step is reported once"
        ends = [event for event in bench.events(id) if "successfully completed" in event["message"]]
        assert len(ends) == 1
    with bench.database.read() as tx:
        models = tx.execute(sa.select(MODELS.c.job)).scalars().all()
    assert sorted(models) == sorted(ids), "one model each"


def test_workers_when_killed_at_random_moments_then_every_job_ends_once_with_the_same_bytes_and_tokens(played):
    bench, ids, ends = played["killed"]
    assert ends.count("killed") >= 5
    assert set(ends) <= {"killed", "done"}
    assert_as_if_quiet(bench, *ids)


@pytest.mark.parametrize("name", ["killed-of-two"] if POSTGRES else [])
def test_workers_when_two_share_postgres_and_either_is_killed_then_every_job_ends_once_and_the_same(played, name):
    bench, ids, ends = played[name]
    assert ends.count("killed") >= 4
    assert ends[-2:] == ["done", "done"]
    assert_as_if_quiet(bench, *ids)
    with bench.database.read() as tx:
        takeovers = sum("another takes over" in event["message"] for id in ids for event in bench.events(id))
        assert takeovers >= 2
        assert tx.execute(sa.select(WORKERS.c.id)).all() == [], "the rows of the dead are gone too"


@pytest.mark.parametrize("name", STOPPED)
def test_worker_when_stopped_beyond_its_lease_then_its_late_writes_are_refused(played, name):
    bench, ids, report = played[name]
    assert report["was_stopped"]
    assert report["is_same"] or name == "stopped-metrics"
    assert report["ends"] == ["done", "done"]
    assert_as_if_quiet(bench, *ids)


def test_worker_when_requested_to_leave_at_random_moments_then_no_step_is_lost_and_no_loss_counted(played):
    bench, ids, report = played["drained"]
    assert set(report["ends"]) == {"done"}
    assert max(report["seconds"]) < 10
    assert report["wrong"] == []
    assert any("Goes on from step" in event["message"] for event in bench.events(ids[0]))
    assert_as_if_quiet(bench, *ids)


def test_job_when_it_kills_every_worker_then_fails_alone_and_the_others_end_well(played):
    bench, (*good, poison), ends = played["poisoned"]
    assert ends.count("killed") == 4, ends
    assert bench.job(poison)["error"]["code"] == "worker_lost"
    assert [bench.job(id)["attempts"] for id in good] == [0, 0], "a checkpoint clears them"
    assert_as_if_quiet(bench, *good)


def test_worker_when_training_hangs_then_it_ends_and_another_goes_on(played):
    bench, ids, ends = played["hung"]
    assert ends == [f"failed {STUCK}", "done"]
    assert_as_if_quiet(bench, *ids)
