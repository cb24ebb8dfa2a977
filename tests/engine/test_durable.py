"""A run that is stopped or dies, and goes on in a new engine, ends with the files of one that was left alone."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from covering import chosen
from tiny_models import TWO_LINEARS, Job, job_spec, random_data, shallow_backbone

from weft.data.dataset import JobData
from weft.engine.engine import Engine
from weft.engine.events import Event, JobFailed, JobStarted, JobSucceeded, JobWarning
from weft.store.run_dir import RunDirectory, RunRecord

TIMES = ("time", "eval_runtime")
"""What differs from run to run in metrics.jsonl."""


def jobs() -> list[Job]:
    """One that stops early, one with dropout and warm-up, one that just trains."""
    two = {"target_modules": TWO_LINEARS}
    stops = job_spec(
        "stops", adapter={}, max_steps=20, learning_rate=0.02, eval_data=4, eval_steps=1, early_stopping_patience=2,
        save_steps=3,
    )  # fmt: skip
    drops = job_spec(
        "drops", adapter={"lora_dropout": 0.4, **two}, max_steps=9, warmup_steps=4, lr_scheduler_type="cosine",
        save_steps=2, save_total_limit=1, weight_decay=0.1, eval_data=2, eval_steps=3,
    )  # fmt: skip
    plain = job_spec("plain", adapter={"r": 2, **two}, max_steps=7, save_steps=100, max_grad_norm=0.1, logging_steps=3)
    return [
        (stops, random_data(1, num_samples=8, num_eval=4)),
        (drops, random_data(2, num_samples=11, num_eval=2)),
        (plain, random_data(3, num_samples=6)),
    ]


@pytest.fixture(scope="module")
def backbone():
    return shallow_backbone("llama_odd")


def open_dir(path: Path) -> RunDirectory:
    """The directory of a run, taken up again where there is one."""
    directory = RunDirectory.open(path, resume=(path / "run.json").exists())
    if not (path / "run.json").exists():
        directory.write_run(RunRecord())
    return directory


def run_until(backbone, path: Path, num_events: int | None, *, gently: bool = True, capacity: int = 48) -> list[Event]:
    """Trains in a new engine; after some events stops it, or just drops it as a crash would."""
    engine = Engine(backbone, capacity=capacity)
    seen: list[Event] = []
    with open_dir(path) as directory:
        engine.keep_in(directory)
        for spec, data in jobs():
            engine.submit(spec, data)
        for event in engine.events():
            seen.append(event)
            if len(seen) == num_events:
                if not gently:
                    break
                engine.stop()
    return seen


def is_done(path: Path) -> bool:
    return all(
        (status := path / spec.name / "status.json").exists() and json.loads(status.read_text())["state"] == "succeeded"
        for spec, _ in jobs()
    )


def files(path: Path) -> dict[str, bytes]:
    """Everything that must not depend on how the run came about: adapters, and metrics without times."""
    found = {str(f.relative_to(path)): f.read_bytes() for f in sorted(path.glob("*/adapter/*"))}
    for metrics in sorted(path.glob("*/metrics.jsonl")):
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
        kept = [{k: v for k, v in record.items() if k not in TIMES} for record in records]
        found[str(metrics.relative_to(path))] = json.dumps(kept, indent=0).encode()
    return found


@pytest.fixture(scope="module")
def undisturbed(backbone, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("undisturbed") / "run"
    events = run_until(backbone, path, None)
    early = {event.job: event.early_stopped for event in events if isinstance(event, JobSucceeded)}
    assert early == {"stops": True, "drops": False, "plain": False}
    return path


def stops(seed: int) -> Iterator[int]:
    rng = np.random.default_rng(seed)
    while True:
        yield int(rng.integers(1, 25))


@pytest.mark.parametrize(
    ("seed", "how"), chosen([(0, "stopped"), (3, "dropped"), (1, "dropped"), (2, "stopped")], 0, 1)
)
def test_run_when_interrupted_again_and_again_then_files_are_those_of_an_undisturbed_one(
    backbone, undisturbed, tmp_path, seed, how
):
    path = tmp_path / "run"
    gently, rounds = how == "stopped", 0
    for num_events in stops(seed):
        # A dropped run loses what came after its last checkpoint, so it needs longer rounds to get anywhere.
        run_until(backbone, path, num_events if gently else num_events + 15, gently=gently)
        rounds += 1
        if is_done(path):
            break
        assert rounds < 60
    assert rounds >= 3
    assert files(path) == files(undisturbed)


def test_metrics_when_run_then_each_logged_step_is_there_once(undisturbed):
    lines = [json.loads(line) for line in (undisturbed / "drops" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in lines if "loss" in r] == list(range(1, 10))
    assert [r["step"] for r in lines if "eval_loss" in r] == [3, 6, 9]
    assert all(("mean_token_accuracy" in r) != ("eval_mean_token_accuracy" in r) for r in lines)
    plain = [json.loads(line) for line in (undisturbed / "plain" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in plain] == [3, 6, 7]


def test_checkpoints_when_done_then_no_more_are_kept_than_requested(undisturbed):
    kept = {spec.name: len(list((undisturbed / spec.name / "checkpoints").iterdir())) for spec, _ in jobs()}
    assert kept == {"stops": 2, "drops": 1, "plain": 1}


def test_adapter_when_stopped_early_then_is_the_best_evaluated(backbone, undisturbed):
    """Training no further than the best evaluation gives the adapter that was written."""
    lines = [json.loads(line) for line in (undisturbed / "stops" / "metrics.jsonl").read_text().splitlines()]
    evals = {r["step"]: r["eval_loss"] for r in lines if "eval_loss" in r}
    best = min(evals, key=evals.__getitem__)
    assert best == max(evals) - 2
    engine = Engine(backbone, capacity=48)
    spec, data = jobs()[0]
    engine.submit(spec, data)
    at_best = {}
    for event in engine.events():
        if event.kind == "eval" and event.step == best:
            at_best = engine.adapter_of("stops")
    assert all(
        a.equal(at_best[path][0]) and b.equal(at_best[path][1]) for path, (a, b) in engine.adapter_of("stops").items()
    )


def test_resume_when_newest_checkpoint_is_damaged_then_warns_and_ends_the_same(backbone, undisturbed, tmp_path):
    path = tmp_path / "run"
    run_until(backbone, path, 45)
    newest = sorted((path / "stops" / "checkpoints").iterdir())[-1] / "tensors.safetensors"
    damaged = bytearray(newest.read_bytes())
    damaged[-5] ^= 1
    newest.write_bytes(damaged)
    events = run_until(backbone, path, None)
    assert [event.jobs for event in events if isinstance(event, JobWarning)] == [("stops",)]
    started = {event.job: event.step for event in events if isinstance(event, JobStarted)}
    assert 0 < started["stops"] < int(newest.parent.name.removeprefix("step-"))
    assert files(path) == files(undisturbed)


def test_resume_when_data_changed_then_that_job_fails_and_the_others_end_the_same(backbone, undisturbed, tmp_path):
    path = tmp_path / "run"
    run_until(backbone, path, 30)
    engine = Engine(backbone, capacity=48)
    with open_dir(path) as directory:
        engine.keep_in(directory)
        for spec, data in jobs():
            other = JobData(random_data(77).train, data.eval)
            engine.submit(spec, other if spec.name == "drops" else data)
        failed = [event for event in engine.events() if isinstance(event, JobFailed)]
    assert [event.job for event in failed] == ["drops"]
    assert "train_data" in failed[0].reason.text
    kept = {name: data for name, data in files(undisturbed).items() if not name.startswith("drops")}
    assert {name: data for name, data in files(path).items() if not name.startswith("drops")} == kept


def test_resume_when_the_rank_changed_then_that_job_fails_and_the_others_end_the_same(backbone, undisturbed, tmp_path):
    path = tmp_path / "run"
    run_until(backbone, path, 30)
    engine = Engine(shallow_backbone("llama_odd"), capacity=48)
    with open_dir(path) as directory:
        engine.keep_in(directory)
        for spec, data in jobs():
            other = dataclasses.replace(spec, adapter=dataclasses.replace(spec.adapter, r=7))
            engine.submit(other if spec.name == "drops" else spec, data)
        failed = [event.job for event in engine.events() if isinstance(event, JobFailed)]
    assert failed == ["drops"]
    kept = {name: data for name, data in files(undisturbed).items() if not name.startswith("drops")}
    assert {name: data for name, data in files(path).items() if not name.startswith("drops")} == kept


def test_resume_when_capacity_changed_then_reports_that_bits_may_differ(backbone, tmp_path):
    path = tmp_path / "run"
    run_until(backbone, path, 30)
    events = run_until(backbone, path, None, capacity=64)
    warned = {event.jobs: event.message for event in events if isinstance(event, JobWarning)}
    assert warned.keys() == {("stops",), ("drops",), ("plain",)}
    assert all("capacity 48 -> 64" in message for message in warned.values())
    assert is_done(path)


def test_resume_when_dropout_masks_are_another_versions_then_a_warning_reports_it(backbone, tmp_path, monkeypatch):
    path = tmp_path / "run"
    with monkeypatch.context() as before:
        before.setattr("weft.engine.execute.local.MASKS", 1)
        run_until(backbone, path, 30)
    warned = [event for event in run_until(backbone, path, None) if isinstance(event, JobWarning)]
    assert [(event.jobs, "masks of another version" in event.message) for event in warned] == [(("drops",), True)]


def test_resume_when_everything_is_done_then_the_adapters_are_written_again_the_same(backbone, undisturbed, tmp_path):
    path = tmp_path / "run"
    run_until(backbone, path, None)
    for adapter in path.glob("*/adapter/adapter_model.safetensors"):
        adapter.unlink()
    events = run_until(backbone, path, None)
    assert not [event for event in events if event.kind == "step"]
    assert files(path) == files(undisturbed)
