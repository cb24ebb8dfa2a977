"""Jobs that go on from a fine-tuned model, jobs with files behind a URL, and jobs beyond a quota."""

from __future__ import annotations

from dataclasses import replace

import pytest
from worker_bench import CAPACITY, Bench

from weft.engine.train import execute_run, prepare_run
from weft.serve.blobs import Blobs
from weft.serve.jobs.spec import build_spec
from weft.serve.records.models import delete_model
from weft.serve.records.tenants import update_tenant
from weft.spec import RunSpec
from weft.store.run_dir import RunDirectory


@pytest.fixture
def bench(tmp_path):
    made = Bench.at(tmp_path)
    yield made
    made.database.close()


def test_job_when_it_starts_from_a_model_then_equals_weft_train_with_init_adapter(bench):
    first = bench.submit()
    with bench.worker():
        (done,) = bench.wait(first)
        # The shape is the model's own; nothing says it twice.
        second = bench.submit(seed=9, adapter={}, init_adapter=done["fine_tuned_model"])
        (job,) = bench.wait(second)
    assert job["status"] == "succeeded", job["error"]
    place = bench.place / "twin"
    start = place / "start"
    start.mkdir(parents=True)
    for name, data in bench.adapter(first).items():
        (start / name).write_bytes(data)
    (place / "train.jsonl").write_bytes(bench._content(job["training_file"]))
    spec = build_spec({**job["settings"], "init_adapter": "start"}, name="twin", train_data="train.jsonl", seed=9)
    run = prepare_run(RunSpec("tiny", (spec,), capacity=CAPACITY, device="cpu"), base_dir=place)
    with RunDirectory.open(place / "run", resume=False) as directory:
        execute_run(run, directory, on_event=lambda _: None)
        twin = {path.name: path.read_bytes() for path in directory.adapter_dir("twin").iterdir()}
    assert bench.adapter(second) == twin
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


def test_job_when_its_files_are_behind_a_url_then_trains_all_the_same(bench):
    far = replace(bench, blobs=Blobs(f"memory://{bench.place.name}"))
    id = far.submit()
    with far.worker():
        far.wait(id)
    adapter, tokens = far.twin(id)
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
