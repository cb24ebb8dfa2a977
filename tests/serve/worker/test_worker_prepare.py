"""Jobs that go on from a fine-tuned model, jobs with files behind a URL, and jobs beyond a quota."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from small_model import small_model
from worker_bench import CAPACITY, PATIENCE_S, Bench, rows_of

from weft.engine.train import execute_run, prepare_run
from weft.serve.blobs import Blobs
from weft.serve.db.files import delete_model, get_file, get_model
from weft.serve.db.tenants import update_tenant
from weft.serve.limited_process import FileLimits
from weft.serve.new_job import build_spec
from weft.serve.worker import prepare as prepare_module
from weft.serve.worker.claim import Claim
from weft.serve.worker.prepare import SMALL_BYTES, JobPreparer
from weft.spec import RunSpec
from weft.store.run_dir import RunDirectory
from weft.store.wall_clock import WallClock


@pytest.fixture
def bench(tmp_path):
    made = Bench.at(tmp_path, backbone=str(small_model()))
    yield made
    made.database.close()


def test_job_when_it_starts_from_a_model_then_equals_weft_train_with_init_adapter(bench):
    first = bench.submit()
    with bench.worker():
        (done,) = bench.wait(first)
        # The shape is the model's own; it is not recorded a second time.
        second = bench.submit(seed=9, adapter={}, init_adapter=done["fine_tuned_model"])
        (job,) = bench.wait(second)
    assert job["status"] == "succeeded", job["error"]
    folder = bench.folder / "expected"
    start = folder / "start"
    start.mkdir(parents=True)
    for name, data in bench.adapter(first).items():
        (start / name).write_bytes(data)
    (folder / "train.jsonl").write_bytes(bench._content(job["training_file"]))
    spec = build_spec({**job["settings"], "init_adapter": "start"}, name="expected", train_data="train.jsonl", seed=9)
    run = prepare_run(RunSpec(bench.backbone, (spec,), capacity=CAPACITY, device="cpu"), base_dir=folder)
    with RunDirectory.open(folder / "run", resume=False) as directory:
        execute_run(run, directory, on_event=lambda _: None)
        expected = {path.name: path.read_bytes() for path in directory.adapter_dir("expected").iterdir()}
    assert bench.adapter(second) == expected
    assert bench.adapter(second) != bench.adapter(first)
    assert job["planned_tokens"] == job["trained_tokens"]


def test_job_when_the_model_it_starts_from_is_gone_then_fails_with_a_sentence(bench):
    first = bench.submit()
    with bench.worker():
        (done,) = bench.wait(first)
        with bench.database.begin() as tx:
            delete_model(tx, "default", done["fine_tuned_model"])
        (job,) = bench.wait(bench.submit(adapter={}, init_adapter=done["fine_tuned_model"]))
    assert job["status"] == "failed"
    assert job["error"]["param"] == "model"
    assert "was deleted before the job could start from it" in job["error"]["message"]


def test_job_when_its_stored_file_was_changed_then_fails_before_it_trains_and_names_no_path(bench):
    first = bench.submit()
    with bench.database.read() as tx:
        path = bench.folder / "blobs" / get_file(tx, "default", bench.job(first)["training_file"])["blob"]
    path.write_bytes(path.read_bytes().replace(b"heddle", b"hurdle"))
    with bench.worker():
        (job,) = bench.wait(first)
    assert (job["status"], job["error"]["code"], job["trained_tokens"]) == ("failed", "stored_data_damaged", 0)
    assert str(bench.folder) not in job["error"]["message"]


def test_job_when_the_model_it_starts_from_is_damaged_then_fails_and_names_no_path(bench):
    first = bench.submit()
    with bench.worker():
        (done,) = bench.wait(first)
        with bench.database.read() as tx:
            path = bench.folder / "blobs" / get_model(tx, "default", done["fine_tuned_model"])["blob"]
        path.write_bytes(path.read_bytes()[:-2000] + bytes(2000))
        (job,) = bench.wait(bench.submit(adapter={}, init_adapter=done["fine_tuned_model"]))
    assert (job["status"], job["error"]["code"]) == ("failed", "stored_data_damaged")
    assert str(bench.folder) not in job["error"]["message"]


def test_job_when_its_files_are_behind_a_url_then_trains_all_the_same(bench):
    far = replace(bench, blobs=Blobs(f"memory://{bench.folder.name}"))
    id = far.submit()
    with far.worker():
        far.wait(id)
    adapter, tokens = far.expected(id)
    assert far.adapter(id) == adapter
    assert far.job(id)["trained_tokens"] == tokens


def test_job_when_it_would_pass_the_quota_then_fails_before_it_trains(bench):
    first = bench.submit(max_steps=2)
    second = bench.submit(max_steps=200)
    with bench.database.begin() as tx:
        update_tenant(tx, "default", max_trained_tokens=500)
    with bench.worker():
        done, refused = bench.wait(first, second)
    assert (done["status"], refused["status"], refused["trained_tokens"]) == ("succeeded", "failed", 0)
    assert refused["error"]["code"] == "quota_exceeded"
    assert "of at most 500" in refused["error"]["message"]


LONG_ROWS = rows_of("long") * (SMALL_BYTES // len(rows_of("long")) + 1)


def test_job_when_its_file_is_long_then_it_is_read_in_another_process_and_no_bit_differs(bench):
    id = bench.submit(data=LONG_ROWS)
    with bench.worker():
        bench.wait(id)
    assert bench.adapter(id) == bench.expected(id)[0]


def test_job_when_reading_its_file_takes_too_long_then_it_fails_alone_with_a_sentence(bench):
    """Another tenant's job is prepared and trained meanwhile."""
    slow, other = bench.submit("ash", data=LONG_ROWS), bench.submit("birch")
    with bench.worker(file_limits=FileLimits(seconds=0.001)):
        failed, done = bench.wait(slow, other)
    assert (failed["status"], done["status"]) == ("failed", "succeeded")
    assert failed["error"]["code"] == "invalid_training_file"
    assert "took more than the 0.001 s that a file may take to be read" in failed["error"]["message"]
    assert failed["training_file"] in failed["error"]["message"]


def test_preparers_when_a_tenant_has_many_long_files_then_one_is_left_to_others(monkeypatch):
    """Tenant a's first file is never done; its second waits, and b's is prepared although it came last."""
    may_end, begun = threading.Event(), []

    def prepare(claim, *_):
        begun.append(claim.id)
        assert claim.tenant != "a" or may_end.wait(PATIENCE_S)
        return claim.id

    monkeypatch.setattr(prepare_module, "prepare", prepare)
    is_ready = threading.Semaphore(0)
    preparer = JobPreparer(None, None, None, None, limits=FileLimits(), on_ready=is_ready.release, wall=WallClock())
    for id, tenant in (("a1", "a"), ("a2", "a"), ("b1", "b")):
        preparer.put(Claim({"id": id, "tenant": tenant, "fence": 1}))
    preparer.start()
    assert is_ready.acquire(timeout=PATIENCE_S)
    assert [future.result() for _, future in preparer.ready()] == ["b1"]
    assert "a2" not in begun
    may_end.set()
    for _ in range(2):
        assert is_ready.acquire(timeout=PATIENCE_S)
    assert [future.result() for _, future in preparer.ready()] == ["a1", "a2"]
