"""Fifty jobs of four tenants on three workers, two of which are killed: all is as one undisturbed worker leaves it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from worker_bench import PATIENCE_S, Bench
from worker_processes import bench_at

from weft.serve.db.files import stored_bytes
from weft.serve.db.tables import FILES, METADATA, MODELS
from weft.serve.db.usage import usage_of

SCRIPT = Path(__file__).parent / "worker_processes.py"
TENANTS = ("ash", "birch", "cedar", "damson")
NUM_JOBS = 50
pytestmark = [pytest.mark.faults, pytest.mark.slow]


def crowd(folder: Path) -> tuple[Bench, list[str]]:
    """A bench whose queue holds the fifty jobs, always the same ones."""
    folder.mkdir()
    bench = bench_at(folder)
    METADATA.create_all(bench.database.engine)
    ids = [
        bench.submit(TENANTS[i % 4], seed=i, suffix=f"job{i}", max_steps=2 + i % 3, save_steps=1 + i % 2)
        for i in range(NUM_JOBS)
    ]
    return bench, ids


def ending(bench: Bench, id: str) -> dict[str, Any]:
    """What is left of a job that must not depend on who trained it."""
    job = bench.job(id)
    with bench.database.read() as tx:
        tables = [row.blob for row in tx.execute(sa.select(FILES).where(FILES.c.id.in_(job["result_files"])))]
        num_models = len(tx.execute(sa.select(MODELS.c.id).where(MODELS.c.job == id)).all())
    results = []
    for blob in tables:
        with bench.blobs.open(blob) as stream:
            results.append(stream.read())
    return {
        "status": job["status"],
        "tokens": job["trained_tokens"],
        "adapter": bench.adapter(id),
        "results": results,
        "num_models": num_models,
        "metrics": [event["data"] for event in bench.events(id, "metrics")],
        "num_ends": sum("successfully completed" in event["message"] for event in bench.events(id)),
    }


def test_jobs_of_many_tenants_when_two_of_three_workers_are_killed_then_all_is_as_with_one_undisturbed(tmp_path):
    """Each job ends once, with the same bytes, events and results, and every tenant's account is the same."""
    broken, ids = crowd(tmp_path / "two-killed-of-three")
    quiet, expected_ids = crowd(tmp_path / "undisturbed")
    finished = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path)],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    ends = json.loads(finished.stdout)
    assert ends == {"two-killed-of-three": ["killed", "killed", "done"], "undisturbed": ["done"]}
    takeovers = [event for id in ids for event in broken.events(id) if "another takes over" in event["message"]]
    assert takeovers, "the workers were killed while they held jobs"
    for id, expected_id in zip(ids, expected_ids, strict=True):
        found = ending(broken, id)
        assert (found["status"], found["num_models"], found["num_ends"], len(found["results"])) == (
            "succeeded",
            1,
            1,
            1,
        )
        assert found == ending(quiet, expected_id)
    with broken.database.read() as tx, quiet.database.read() as quiet_tx:
        for tenant in TENANTS:
            assert usage_of(tx, tenant) == usage_of(quiet_tx, tenant)
            assert stored_bytes(tx, tenant) == stored_bytes(quiet_tx, tenant)
    broken.database.close()
    quiet.database.close()
