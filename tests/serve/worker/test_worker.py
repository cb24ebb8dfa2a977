"""A worker that only a database and a file store talk to trains what `weft train` would have trained."""

from __future__ import annotations

import json
import threading
import time

import pytest
from small_model import small_model
from worker_bench import PATIENCE_S, Bench, wait_until

from weft.plan.cost.shape import choose_capacity
from weft.serve.db import leases, workers
from weft.serve.db.engine import now
from weft.serve.db.files import delete_file, get_file, list_checkpoints
from weft.serve.db.usage import usage_of
from weft.serve.db.workers import live_workers, put_worker
from weft.serve.errors import Busy
from weft.serve.worker import database_sync

BAD_ROWS = b'{"prompt": "a", "completion": "b"}\n{"prompt": 3}\n'


@pytest.fixture
def bench(request, tmp_path):
    made = Bench.at(tmp_path, backbone=getattr(request, "param", str(small_model())))
    yield made
    made.database.close()


on_the_embedded_backbone = pytest.mark.parametrize("bench", ["tiny"], indirect=True)
"""Which learns in a few steps, and is large enough for ranks of 64."""


def test_job_when_queued_then_succeeds_with_the_adapter_of_weft_train(bench):
    id = bench.submit(suffix="loom")
    with bench.worker():
        (job,) = bench.wait(id)
    adapter, tokens = bench.expected(id)
    assert bench.adapter(id) == adapter
    assert job["trained_tokens"] == tokens > 0


@pytest.mark.parametrize(("device", "tokens"), [("cpu", 2048), ("cuda", 8192)])
def test_worker_when_no_capacity_is_given_then_has_that_of_its_device(bench, monkeypatch, device, tokens):
    monkeypatch.setattr("weft.serve.worker.worker.start_capacity", lambda _, given: choose_capacity(given, device))
    with bench.worker(capacity="auto") as worker:
        assert worker.engine.limits.capacity == tokens


def test_jobs_when_of_several_tenants_then_all_train_together_and_each_is_as_if_alone(bench):
    ids = [
        bench.submit(tenant, seed=seed, max_steps=4 + seed) for tenant in ("ash", "birch", "cedar") for seed in (1, 2)
    ]
    with bench.worker() as worker:
        jobs = bench.wait(*ids)
        assert worker.sync.num_claims == 6
    for job in jobs:
        adapter, tokens = bench.expected(job["id"])
        assert bench.adapter(job["id"]) == adapter
        assert job["trained_tokens"] == tokens
        assert job["fine_tuned_model"].startswith(f"ft:tiny:{job['tenant']}::")
    assert len({job["fine_tuned_model"] for job in jobs}) == 6


@on_the_embedded_backbone
def test_job_when_it_succeeds_then_its_whole_story_is_in_the_database(bench):
    id = bench.submit(validation=b'{"prompt": "warp\\n", "completion": "WARP"}\n', eval_steps=3, save_steps=1)
    with bench.worker():
        (job,) = bench.wait(id)
    assert (job["step"], job["total_steps"], job["attempts"], job["worker"]) == (6, 6, 0, None)
    assert job["started_at"] and job["finished_at"] >= job["started_at"] and job["error"] is None
    metrics = [event["data"] for event in bench.events(id, "metrics")]
    assert [m["step"] for m in metrics if "train_loss" in m] == [1, 2, 3, 4, 5, 6]
    assert [m["step"] for m in metrics if "valid_loss" in m] == [3, 6]
    messages = [event["message"] for event in bench.events(id, "message")]
    assert messages[-1] == "The job has successfully completed"
    with bench.database.read() as tx:
        kept = list_checkpoints(tx, "default", id).items
        (file,) = job["result_files"]
        table = get_file(tx, "default", file)
        assert live_workers(tx) == []
        used = usage_of(tx, "default")["totals"]
    assert (used["trained"], used["evaluated"]) == (job["trained_tokens"], 2 * 13), "two evaluations of 13 tokens"
    assert [row["step"] for row in kept] == [6, 5, 4]
    assert kept[0]["model"] == f"{job['fine_tuned_model']}:ckpt-step-6"
    for name in ("train_loss", "train_mean_token_accuracy"):
        assert kept[0]["metrics"][name] == metrics[-2][name]
    for name in ("valid_loss", "valid_mean_token_accuracy"):
        assert kept[0]["metrics"][name] == kept[0]["metrics"][f"full_{name}"] == metrics[-1][name]
    accuracies = [m["train_mean_token_accuracy"] for m in metrics if "train_loss" in m]
    assert 0 <= accuracies[0] < accuracies[-1] <= 1, "it learned"
    assert 0 <= metrics[-1]["valid_mean_token_accuracy"] <= 1
    assert table["purpose"] == "fine-tune-results"
    with bench.blobs.open(table["blob"]) as stream:
        lines = stream.read().decode().splitlines()
    assert lines[0] == "step,train_loss,train_accuracy,valid_loss,valid_mean_token_accuracy"
    last = metrics[-2] | metrics[-1]
    names = ("train_loss", "train_mean_token_accuracy", "valid_loss", "valid_mean_token_accuracy")
    assert lines[6] == ",".join(repr(last[name]) for name in ("step", *names))
    assert not list((bench.folder / "data").rglob("ftjob-*")), "what was needed only for training is gone"
    assert bench.stored_blobs() == bench.named_blobs()


def test_job_when_earlier_steps_were_logged_without_accuracy_then_its_story_has_gaps_there(bench):
    """What it goes on from may be older than the measure."""
    id = bench.submit(max_steps=20, save_steps=1000)
    with bench.worker():
        bench.wait_for_step(id, 2)
    (path,) = (bench.folder / "data").rglob("metrics.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert 2 <= len(records) < 20 and all(record.pop("mean_token_accuracy") >= 0 for record in records)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    bench.set(id, step=0)  # as if none had been reported
    with bench.worker():
        (job,) = bench.wait(id)
    accuracies = [event["data"]["train_mean_token_accuracy"] for event in bench.events(id, "metrics")][-20:]
    assert accuracies[: len(records)] == [None] * len(records) and None not in accuracies[len(records) :]
    with bench.database.read() as tx, bench.blobs.open(get_file(tx, "default", job["result_files"][0])["blob"]) as file:
        column = [line.split(",")[2] for line in file.read().decode().splitlines()[1:]]
    assert column == ["" if value is None else repr(value) for value in accuracies]
    assert bench.adapter(id) == bench.expected(id)[0]


def test_job_when_cancelled_while_training_then_ends_at_a_step_and_counts_what_it_trained(bench):
    id, other = bench.submit(max_steps=10_000, save_steps=5000), bench.submit("ash")
    with bench.worker():
        bench.wait_for_step(id, 3)
        bench.request(id, "cancel")
        (job,) = bench.wait(id)
        bench.wait(other)
    assert job["status"] == "cancelled"
    per_step = {event["data"]["step"]: event["data"]["trained_tokens"] for event in bench.events(id, "metrics")}
    assert job["trained_tokens"] in per_step.values()
    assert bench.adapter(other) == bench.expected(other)[0]


def test_job_when_paused_and_resumed_then_holds_no_worker_and_ends_with_the_same_bytes(bench):
    id = bench.submit(max_steps=16, save_steps=1000)
    with bench.worker():
        bench.wait_for_step(id, 2)
        bench.request(id, "pause")
        (paused,) = bench.wait(id, until=("paused", "succeeded"))
        assert (paused["status"], paused["worker"], paused["wanted"]) == ("paused", None, None)
        assert 0 < paused["step"] < 16
        bench.request(id, "resume")
        (job,) = bench.wait(id)
    adapter, tokens = bench.expected(id)
    assert bench.adapter(id) == adapter
    assert (job["trained_tokens"], job["attempts"]) == (tokens, 0)
    assert reported_steps(bench, id) == list(range(1, 17))


def test_job_when_paused_before_it_starts_then_waits_until_resumed(bench):
    first = bench.submit(max_steps=200)
    with bench.worker(max_jobs=1):
        bench.wait_for_step(first, 1)
        second = bench.submit("ash")
        bench.request(second, "pause")
        assert bench.job(second)["status"] == "paused"
        bench.request(first, "cancel")
        bench.wait(first)
        assert bench.job(second)["status"] == "paused"
        bench.request(second, "resume")
        bench.wait(second)
    assert bench.job(second)["status"] == "succeeded"


def test_job_when_its_priority_rises_then_it_takes_the_seat_of_a_lower_one(bench):
    low = bench.submit(max_steps=3000, save_steps=3000)
    with bench.worker(max_jobs=1):
        bench.wait_for_step(low, 1)
        high = bench.submit("ash")
        bench.set(high, priority=5)
        bench.wait(high)
        assert bench.job(low)["status"] == "running"
        bench.request(low, "cancel")
        bench.wait(low)
    assert any("gives way" in event["message"] for event in bench.events(low))
    assert bench.adapter(high) == bench.expected(high)[0]


def test_job_when_its_priority_changes_while_training_then_the_engine_knows(bench):
    id = bench.submit(max_steps=3000, save_steps=3000)
    with bench.worker() as worker:
        bench.wait_for_step(id, 1)
        bench.set(id, priority=3)
        deadline = time.monotonic() + PATIENCE_S
        while [job.spec.priority for job in worker.engine.jobs.values()] != [3]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        bench.request(id, "cancel")
        bench.wait(id)


UNFIT: dict[str, tuple[dict, str, str, str]] = {
    "training data": ({"data": BAD_ROWS}, "invalid_training_file", "training_file", "line 2"),
    "validation data": ({"validation": b"\n\n"}, "invalid_validation_file", "validation_file", "no rows"),
    "targets": ({"adapter": {"target_modules": ["nowhere"]}}, "invalid_settings", "target_modules", "nowhere"),
    "length": ({"max_length": 4000}, "invalid_settings", "max_length", "capacity"),
    "rate": ({"learning_rate": 1e18, "max_grad_norm": 0}, "diverged", "learning_rate", "lower learning_rate"),
}


def test_jobs_when_they_cannot_be_trained_then_fail_with_code_and_location_and_others_go_on(bench):
    bad = {what: bench.submit("ash", **change) for what, (change, *_) in UNFIT.items()}
    good = bench.submit()
    deleted = bench.submit("birch")
    with bench.database.begin() as tx:
        delete_file(tx, "birch", bench.job(deleted)["training_file"])
    with bench.worker():
        bench.wait(*bad.values(), good, deleted)
    for what, (_, code, param, words) in UNFIT.items():
        error = bench.job(bad[what])["error"]
        assert error["code"] == code, error
        assert param in error["param"]
        assert words in error["message"]
        assert bench.events(bad[what])[-1]["level"] == "error"
    assert "deleted" in bench.job(deleted)["error"]["message"]
    assert bench.adapter(good) == bench.expected(good)[0]


@on_the_embedded_backbone
def test_job_when_it_can_never_fit_then_fails_with_the_arithmetic(bench):
    large, small = bench.submit(adapter={"r": 64}), bench.submit("ash", adapter={"r": 1, "target_modules": ["q_proj"]})
    with bench.worker(job_memory=300_000):
        bench.wait(large, small)
    error = bench.job(large)["error"]
    assert error["code"] == "does_not_fit"
    assert "can never fit: it needs" in error["message"]
    assert bench.job(small)["status"] == "succeeded"


def test_worker_when_stopped_then_gives_jobs_back_and_the_next_goes_on_where_they_were(bench):
    ids = [bench.submit(tenant, max_steps=24, save_steps=1000) for tenant in ("ash", "birch")]
    with bench.worker():
        for id in ids:
            bench.wait_for_step(id, 2)
    for id in ids:
        job = bench.job(id)
        assert (job["status"], job["worker"], job["attempts"]) == ("queued", None, 0)
        assert job["step"] == job["total_steps"] or job["trained_tokens"] > 0, "the last step is saved"
    with bench.worker():
        bench.wait(*ids)
    for id in ids:
        adapter, tokens = bench.expected(id)
        assert bench.adapter(id) == adapter
        assert bench.job(id)["trained_tokens"] == tokens
        assert reported_steps(bench, id) == list(range(1, 25)), "no step is reported twice"
        assert any("Goes on from step" in event["message"] for event in bench.events(id))


def test_job_when_it_is_taken_from_a_live_worker_then_that_one_drops_it_and_writes_no_more(bench):
    id = bench.submit(max_steps=3000, save_steps=3000)
    with bench.worker() as worker:
        bench.wait_for_step(id, 3)
        # As if another worker had taken it over and holds it now.
        hold(bench, "another")
        bench.set(id, fence=9, worker="another", lease_until=2.0**40, trained_tokens=5)
        deadline = time.monotonic() + PATIENCE_S
        while worker.engine.jobs:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        job, events = bench.job(id), bench.events(id)
        time.sleep(0.5)
        assert (bench.job(id), bench.events(id)) == (job, events)
        assert (job["status"], job["trained_tokens"], job["fence"]) == ("running", 5, 9)
        # And as if that one gave it back.
        bench.set(id, worker=None, lease_until=None, step=0)
        bench.wait_for_step(id, 1)
        bench.request(id, "cancel")
        bench.wait(id)
    assert bench.stored_blobs() == bench.named_blobs()


def hold(bench, worker):
    """Adds the row of a worker that takes no jobs and whose leases may last for ever."""
    with bench.database.begin() as tx:
        columns = {"base_model": "tiny", "address": None, "token": None, "info": {}}
        put_worker(tx, worker, **columns, is_draining=True, lease_s=2.0**41)


def test_worker_when_the_database_clock_is_set_forward_then_others_can_renew_before_it_claims(bench, monkeypatch):
    ahead_s, jumps = 0.0, threading.Event()

    def now_in_round(tx):
        nonlocal ahead_s
        ahead_s = 6000.0 if jumps.is_set() else 0.0
        return now(tx) + ahead_s

    monkeypatch.setattr(database_sync, "now", now_in_round)
    for module in (leases, workers):
        monkeypatch.setattr(module, "now", lambda tx: now(tx) + ahead_s)
    monkeypatch.setattr(database_sync, "LEAVE_TO_OTHERS_S", PATIENCE_S)
    id = bench.submit(max_steps=2)
    hold(bench, "another")
    bench.set(id, fence=9, worker="another", lease_until=time.time() + 3000)
    with bench.worker() as worker:
        wait_until(lambda: worker.sync._num_rounds > 1)
        jumps.set()
        rounds = worker.sync._num_rounds
        wait_until(lambda: worker.sync._num_rounds > rounds + 3)
        assert (bench.job(id)["worker"], bench.job(id)["fence"]) == ("another", 9)
        worker.sync._claims.claim_after = 0.0
        bench.wait(id)
    assert bench.job(id)["fence"] == 10, "the lease was not renewed"


def test_worker_when_the_database_is_away_for_a_while_then_loses_nothing(bench, monkeypatch):
    id = bench.submit(max_steps=24)
    with bench.worker() as worker:
        bench.wait_for_step(id, 2)
        pulse = worker.sync._pulse
        failures = iter(range(5))

        def unlucky(is_last):
            if next(failures, None) is not None:
                raise Busy("away")
            pulse(is_last)

        monkeypatch.setattr(worker.sync, "_pulse", unlucky)
        (job,) = bench.wait(id)
    assert job["status"] == "succeeded"
    assert next(failures, None) is None
    assert reported_steps(bench, id) == list(range(1, 25))


def test_worker_when_alive_then_its_row_reports_what_it_does(bench):
    id = bench.submit(max_steps=3000, save_steps=3000)
    with bench.worker() as worker:
        bench.wait_for_step(id, 5)

        def row_of_it():
            with bench.database.read() as tx:
                return live_workers(tx, "tiny")[0]

        wait_until(lambda: row_of_it()["info"]["tokens_per_s"] > 0)
        row = row_of_it()
        assert row["address"] == worker.address
        assert row["info"]["device"] == "cpu"
        assert row["info"]["tokens_per_s"] > 0
        assert row["info"]["memory_bytes"] > 0
        assert row["info"]["time"]["computing_s"] > 0
        assert [job["id"] for job in row["info"]["jobs"]] == [id]
        assert "forward_backward" in {span["name"] for span in row["info"]["program"]}
        bench.request(id, "cancel")
        bench.wait(id)


def test_worker_when_its_training_hangs_then_its_row_reports_for_how_long(bench, monkeypatch):
    goes_on = threading.Event()
    with bench.worker() as worker:
        monkeypatch.setattr(worker.scheduler, "take_turn", lambda trained_s: not goes_on.wait(PATIENCE_S))

        def silent_s():
            with bench.database.read() as tx:
                return [row["info"]["trainer_silent_s"] for row in live_workers(tx, "tiny")]

        wait_until(lambda: any(seconds > 0.5 for seconds in silent_s()))
        goes_on.set()
        wait_until(lambda: any(seconds < 0.5 for seconds in silent_s()))


def reported_steps(bench, id):
    return [event["data"]["step"] for event in bench.events(id, "metrics") if "train_loss" in event["data"]]
