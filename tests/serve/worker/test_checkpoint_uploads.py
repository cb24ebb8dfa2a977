"""A job's newest checkpoint is in the file store, and a worker on another machine goes on there."""

from __future__ import annotations

import json
import threading

import pytest
import sqlalchemy as sa
from small_model import small_model
from worker_bench import PATIENCE_S, Bench, wait_until

from weft.errors import StorageError
from weft.serve.db.files import stored_bytes
from weft.serve.db.leases import claim_jobs
from weft.serve.db.tables import JOBS
from weft.serve.worker.checkpoint_uploads import CheckpointUploads, record_saved, results_table
from weft.serve.worker.claim import Claim
from weft.serve.worker.directory import WorkDirectory


@pytest.fixture
def bench(tmp_path):
    made = Bench.at(tmp_path, backbone=str(small_model()))
    yield made
    made.database.close()


def messages(bench, id):
    return [event["message"] for event in bench.events(id)]


def claimed(bench, worker="w1"):
    with bench.database.begin() as tx:
        (row,) = claim_jobs(tx, worker, "tiny", 1)
    return Claim(row)


def test_job_when_its_worker_leaves_then_another_machine_goes_on_at_that_step_with_the_same_bytes(bench):
    """Drain loses no step, although the next worker sees nothing of the first one's directory."""
    id = bench.submit(max_steps=30, save_steps=1000)
    with bench.worker(data_dir=bench.folder / "here"):
        bench.wait_for_step(id, 3)
    left = bench.job(id)
    assert left["status"] == "queued" and left["attempts"] == 0
    assert left["saved_step"] == left["step"] >= 3
    with bench.worker(data_dir=bench.folder / "there"):
        (job,) = bench.wait(id)
    assert f"Goes on from step {left['step']} of 30" in messages(bench, id)
    adapter, tokens = bench.expected(id)
    assert (bench.adapter(id), job["trained_tokens"]) == (adapter, tokens)
    steps = [event["data"]["step"] for event in bench.events(id, "metrics")]
    assert steps == list(range(1, 31)), "every step is reported once"
    assert (job["saved_step"], job["saved_blob"]) == (None, None)
    assert bench.stored_blobs() == bench.named_blobs(), "the checkpoint is deleted with the job's end"


def test_checkpoint_when_saved_while_training_then_in_the_store_soon_and_in_nobodys_quota(bench):
    id = bench.submit(max_steps=100_000, save_steps=2)
    with bench.database.read() as tx:
        before = stored_bytes(tx, "default")
    with bench.worker():
        wait_until(lambda: (bench.job(id)["saved_step"] or 0) >= 4)
        with bench.database.read() as tx:
            assert stored_bytes(tx, "default") == before
        bench.request(id, "cancel")
        bench.wait(id)
    assert bench.stored_blobs() == bench.named_blobs()


def test_job_when_the_stored_checkpoint_is_damaged_or_gone_then_starts_again_and_ends_the_same(bench):
    ids = [bench.submit(tenant, max_steps=30, save_steps=1000) for tenant in ("ash", "birch")]
    with bench.worker(data_dir=bench.folder / "here"):
        for id in ids:
            bench.wait_for_step(id, 2)
    damaged, gone = (bench.folder / "blobs" / bench.job(id)["saved_blob"] for id in ids)
    damaged.write_bytes(damaged.read_bytes()[:-3000] + bytes(3000))
    gone.unlink()
    with bench.worker(data_dir=bench.folder / "there"):
        bench.wait(*ids)
    for id in ids:
        assert bench.adapter(id) == bench.expected(id)[0]


def test_job_when_the_store_refuses_checkpoints_then_trains_on_and_succeeds(bench, monkeypatch, caplog):
    def refuse(paths):
        raise StorageError("the file store does not answer.")

    real = bench.blobs.put_files
    monkeypatch.setattr(bench.blobs, "put_files", lambda paths: (
        refuse(paths) if any(path.name == "state.json" for path in paths) else real(paths)
    ))  # fmt: skip
    id = bench.submit(save_steps=1)
    with bench.worker():
        (job,) = bench.wait(id)
    assert job["status"] == "succeeded"
    assert any("a checkpoint was not stored" in record.message for record in caplog.records)


def test_checkpoint_when_the_store_is_inside_the_data_directory_then_is_not_copied(bench):
    """Workers that share such a store share the data directory, and find the checkpoint there."""
    id = bench.submit(max_steps=100_000, save_steps=1)
    with bench.worker(data_dir=bench.folder):
        bench.wait_for_step(id, 3)
    assert bench.job(id)["saved_blob"] is None
    with bench.worker(data_dir=bench.folder):
        wait_until(lambda: any("Goes on from step" in text for text in messages(bench, id)))
        bench.request(id, "cancel")
        bench.wait(id)


def test_checkpoint_when_the_job_was_taken_over_or_is_over_then_its_row_does_not_name_it(bench):
    bench.submit()
    old = claimed(bench)
    with bench.database.begin() as tx:
        assert record_saved(tx, old, 4, "first") == []
        assert record_saved(tx, old, 6, "second") == ["first"]
        tx.execute(sa.update(JOBS).values(fence=2))
        assert record_saved(tx, old, 8, "late") == ["late"]
        new = Claim({**old.job, "fence": 2})
        tx.execute(sa.update(JOBS).values(status="succeeded"))
        assert record_saved(tx, new, 10, "later") == ["later"]
        assert tx.execute(sa.select(JOBS.c.saved_step, JOBS.c.saved_blob)).one() == (6, "second")


def test_checkpoints_when_saved_faster_than_the_store_takes_them_then_only_the_newest_is_copied(bench, monkeypatch):
    """One is under way at a time; of those that wait, the newest counts."""
    bench.submit()
    claim = claimed(bench)
    work = WorkDirectory(bench.folder / "data", "worker-1", "tiny")
    copied: list[str] = []
    begun, may_end = threading.Event(), threading.Event()

    def slow(paths, suffix=".zip"):
        copied.append(paths[0].parent.name)
        begun.set()
        assert may_end.wait(PATIENCE_S)
        return bench.blobs.put(b"", ".zip")

    monkeypatch.setattr(bench.blobs, "put_files", slow)
    uploads = CheckpointUploads(bench.database, bench.blobs, work)
    uploads.start()
    uploads.offer(claim, 1)
    assert begun.wait(PATIENCE_S)
    for step in (2, 3, 4):
        uploads.offer(claim, step)
    assert uploads.is_busy_with(claim) and not uploads.is_idle
    may_end.set()
    wait_until(lambda: uploads.is_idle)
    work.close()
    assert copied == ["step-00000001", "step-00000004"]
    assert bench.job(claim.id)["saved_step"] == 4
    assert bench.stored_blobs() == bench.named_blobs()


def test_results_table_when_an_objective_measures_more_then_its_columns_follow():
    lines = [
        {"step": 1, "epoch": 0.5, "loss": 0.5, "mean_token_accuracy": 0.25, "time": 1.0, "rewards/margins": 2.0},
        {"step": 1, "epoch": 0.5, "eval_loss": 0.75, "eval_rewards/margins": None, "eval_runtime": 0.1, "time": 2.0},
        {"step": 2, "epoch": 1.0, "loss": None, "skipped": True, "time": 3.0, "rewards/margins": None},
    ]
    table = results_table("\n".join(json.dumps(line) for line in lines).encode()).decode()
    columns = "step,train_loss,train_accuracy,valid_loss,valid_mean_token_accuracy"
    assert table.splitlines() == [
        f"{columns},train_rewards/margins,valid_rewards/margins",
        "1,0.5,0.25,0.75,,2.0,",
        "2,,,,,,",
    ]
