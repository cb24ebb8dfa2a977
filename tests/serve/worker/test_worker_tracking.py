"""Metrics go to Weights & Biases for the jobs that request it, and what goes wrong there is a warning."""

from __future__ import annotations

import sys
import threading
import types
from importlib.machinery import ModuleSpec
from typing import Any

import pytest
from small_model import small_model
from worker_bench import PATIENCE_S, Bench

from weft.engine.events import JobFailed, StepDone
from weft.job_state import Reason, ReasonCode
from weft.serve.worker.claim import MAX_WAITING, Claim, Tracking


class FakeWandb(types.ModuleType):
    """One record per run; some projects cannot be reached."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = ModuleSpec("wandb", None)
        self.runs: list[Any] = []
        self.answers = threading.Event()
        self.answers.set()

    def init(self, **options: Any) -> Any:
        assert self.answers.wait(PATIENCE_S)
        if options["project"] == "away":
            raise RuntimeError("No API key configured")
        run = types.SimpleNamespace(options=options, rows=[], exit_code=None)
        run.log = lambda row, step: run.rows.append((step, row))
        run.finish = lambda exit_code: setattr(run, "exit_code", exit_code)
        self.runs.append(run)
        return run


@pytest.fixture
def wandb(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


@pytest.fixture
def bench(tmp_path):
    made = Bench.at(tmp_path, backbone=str(small_model()))
    yield made
    made.database.close()


def integrations_to(project: str, **more: Any) -> list[Any]:
    return [{"type": "wandb", "wandb": {"project": project, **more}}]


def test_jobs_when_some_request_wandb_then_only_their_metrics_get_there(bench, wandb):
    plain, tracked, lost = bench.submit("ash"), bench.submit(suffix="loom"), bench.submit("birch")
    bench.set(tracked, integrations=integrations_to("p", entity="e", tags=["x"]))
    bench.set(lost, integrations=integrations_to("away"))
    with bench.worker():
        jobs = bench.wait(plain, tracked, lost)
    assert [job["status"] for job in jobs] == ["succeeded"] * 3
    (run,) = wandb.runs
    options = run.options
    assert (options["project"], options["entity"], options["tags"]) == ("p", "e", ["x"])
    assert (options["name"], options["id"], options["group"]) == ("loom", tracked, "default")
    assert options["settings"]["console"] == "off", "the worker's own output is not the tenant's"
    for sent, name in {"loss": "train_loss", "mean_token_accuracy": "train_mean_token_accuracy"}.items():
        values = [event["data"][name] for event in bench.events(tracked, "metrics")]
        assert [(step, row[f"train/{sent}"]) for step, row in run.rows] == list(enumerate(values, 1))
    assert run.exit_code == 0
    assert any("No API key configured" in event["message"] for event in bench.events(lost))
    assert not any("wandb" in event["message"] for id in (plain, tracked) for event in bench.events(id))


def claim_of(project: str = "p") -> Claim:
    job = {"id": "ftjob-1", "fence": 1, "tenant": "acme", "suffix": None, "integrations": integrations_to(project)}
    return Claim(job)


def step(number: int) -> StepDone:
    return StepDone("ftjob-1.1", number, 9, 0.1, 2.5, 0.5, 1.0, 1e-4, 64, 64 * number, 0.1)


def test_tracker_when_it_does_not_answer_then_nothing_waits_and_memory_is_bounded(wandb, tmp_path):
    wandb.answers.clear()
    tracking = Tracking(tmp_path, lambda name, text: None)
    job = claim_of()
    for number in range(MAX_WAITING + 500):
        tracking.record(job, step(number))
    wandb.answers.set()
    tracking.record(job, JobFailed("ftjob-1.1", 1, Reason(ReasonCode.DIVERGED, "diverged")))
    tracking.close(PATIENCE_S)
    (run,) = wandb.runs
    assert MAX_WAITING <= len(run.rows) <= MAX_WAITING + 500
    assert run.exit_code is not None


def test_runs_when_the_worker_lets_go_of_a_job_then_end_and_can_be_gone_on_with(wandb, tmp_path):
    tracking = Tracking(tmp_path, lambda name, text: None)
    for _ in range(2):
        tracking.record(job := claim_of(), step(1))
        tracking.record(job, None)
    tracking.close(30)
    assert [run.exit_code for run in wandb.runs] == [0, 0]
    assert {(run.options["id"], run.options["resume"]) for run in wandb.runs} == {("ftjob-1", "allow")}


def test_wandb_when_not_installed_here_then_a_warning_and_nothing_else(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    messages: list[tuple[str, str]] = []
    tracking = Tracking(tmp_path, lambda name, text: messages.append((name, text)))
    for number in (1, 2):
        tracking.record(claim_of(), step(number))
    tracking.close(30)
    assert messages == [("ftjob-1.1", "wandb is not installed where this job trains; it gets no metrics")]
