import dataclasses
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from made_events import eval_done, step_done

from weft.engine.events import (
    CheckpointSaved,
    EvalDone,
    JobCancelled,
    JobFailed,
    JobSucceeded,
    JobWarning,
    MicrobatchDone,
    StepDone,
)
from weft.errors import ConfigError, MissingExtraError
from weft.job_state import Reason, ReasonCode
from weft.report.trackers import TRACKED, TRACKERS, Trackers, open_trackers
from weft.spec import run as run_spec


class FakeWandb(types.ModuleType):
    """What wandb does with the calls we make: one record per run."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.runs: list[Any] = []

    def init(self, **options: Any) -> Any:
        run = types.SimpleNamespace(options=options, rows=[], exit_code=None)
        run.log = lambda row, step: run.rows.append((step, row))
        run.finish = lambda exit_code: setattr(run, "exit_code", exit_code)
        self.runs.append(run)
        return run


class FakeMlflowClient:
    """An MLflow server in a few dictionaries."""

    runs: dict[str, dict[str, Any]]
    experiments: list[str]

    def get_experiment_by_name(self, name: str) -> Any:
        known = name in self.experiments
        return types.SimpleNamespace(experiment_id=str(self.experiments.index(name))) if known else None

    def create_experiment(self, name: str) -> str:
        self.experiments.append(name)
        return str(len(self.experiments) - 1)

    def create_run(self, experiment_id: str, *, run_name: str, tags: dict[str, str]) -> Any:
        run_id = f"id-{len(self.runs)}"
        self.runs[run_id] = {"name": run_name, "tags": tags, "metrics": [], "status": "RUNNING", "in": experiment_id}
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id))

    def log_batch(self, run_id: str, metrics: list[Any]) -> None:
        self.runs[run_id]["metrics"] += metrics

    def set_terminated(self, run_id: str, status: str) -> None:
        self.runs[run_id]["status"] = status


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


@pytest.fixture
def mlflow_runs(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    FakeMlflowClient.runs, FakeMlflowClient.experiments = {}, ["Default"]
    modules = {name: types.ModuleType(name) for name in ("mlflow", "mlflow.entities", "mlflow.tracking")}
    vars(modules["mlflow.entities"])["Metric"] = lambda key, value, timestamp, step: (key, value, step)
    vars(modules["mlflow.tracking"])["MlflowClient"] = FakeMlflowClient
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return FakeMlflowClient.runs


def test_tracked_then_each_is_reported_by_a_step_or_an_evaluation() -> None:
    names = [{field.name for field in dataclasses.fields(event)} for event in (StepDone, EvalDone)]
    assert set(TRACKED) <= names[0] | names[1]
    assert {"loss", "mean_token_accuracy"} <= names[0] & set(TRACKED)
    assert {"eval_loss", "eval_mean_token_accuracy"} <= names[1] & set(TRACKED)


def test_tensorboard_then_the_event_files_of_each_job_hold_its_metrics(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = open_trackers(["tensorboard"], tmp_path, "evening")
    for step in (1, 2, 3):
        trackers.record(step_done("a", step, loss=4.0 / step))
        trackers.record(step_done("b", step, loss=9.0))
    trackers.record(eval_done("a", 3, 1.25))
    trackers.record(JobSucceeded("a", 3, None))
    trackers.close()
    read = EventAccumulator(str(tmp_path / "tensorboard" / "a")).Reload()
    assert {"eval/loss", "train/learning_rate", "train/loss"} <= set(read.Tags()["scalars"])
    assert [(e.step, e.value) for e in read.Scalars("train/loss")] == [(1, 4.0), (2, 2.0), (3, pytest.approx(4 / 3))]
    assert [(e.step, e.value) for e in read.Scalars("eval/loss")] == [(3, 1.25)]
    other = EventAccumulator(str(tmp_path / "tensorboard" / "b")).Reload()
    assert [e.value for e in other.Scalars("train/loss")] == [9.0, 9.0, 9.0]


def test_wandb_then_one_run_per_job_side_by_side_in_one_group(wandb: FakeWandb, tmp_path: Path) -> None:
    trackers = open_trackers(["wandb"], tmp_path, "evening")
    trackers.record(step_done("a", 1, loss=1.0))
    trackers.record(step_done("b", 1, loss=3.0))
    trackers.record(eval_done("a", 1, 2.0))
    trackers.record(JobSucceeded("a", 1, None))
    trackers.record(JobFailed("b", 1, Reason(ReasonCode.DIVERGED, "diverged")))
    trackers.close()
    a, b = wandb.runs
    expected = {"name": "a", "group": "evening", "dir": str(tmp_path), "reinit": "create_new"}
    assert a.options == expected
    assert a.rows == [
        (
            1,
            {
                "train/loss": 1.0,
                "train/mean_token_accuracy": 0.5,
                "train/grad_norm": 1.0,
                "train/learning_rate": 2e-4,
                "train/epoch": 0.1,
                "train/num_tokens": 100,
            },
        ),
        (1, {"train/epoch": 0.1, "eval/loss": 2.0, "eval/mean_token_accuracy": 0.25}),
    ]
    assert (a.exit_code, b.exit_code) == (0, 1)


def test_mlflow_then_jobs_are_runs_inside_one_parent(mlflow_runs: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    trackers = open_trackers(["mlflow"], tmp_path, "evening")
    trackers.record(step_done("a", 1, loss=1.0))
    trackers.record(step_done("b", 1))
    trackers.record(step_done("c", 1))
    trackers.record(JobSucceeded("a", 1, None))
    trackers.record(JobCancelled("b", 1))
    trackers.close()
    parent, a, b, c = mlflow_runs.values()
    assert (parent["name"], parent["tags"], parent["status"]) == ("evening", {}, "FINISHED")
    assert a["tags"] == b["tags"] == c["tags"] == {"mlflow.parentRunId": "id-0"}
    assert (a["status"], b["status"], c["status"]) == ("FINISHED", "KILLED", "FAILED")
    assert ("loss", 1.0, 1) in a["metrics"]
    assert {run["in"] for run in mlflow_runs.values()} == {"1"}


@pytest.mark.parametrize("name", TRACKERS)
@pytest.mark.usefixtures("wandb", "mlflow_runs")
def test_tracker_when_used_in_any_order_then_it_never_complains(name: str, tmp_path: Path) -> None:
    tracker = TRACKERS[name](tmp_path, "evening")
    tracker.finish("never-logged", "failed")
    tracker.log("a", 1, {"loss": float("nan")})
    tracker.finish("a", "failed")
    tracker.finish("a", "failed")
    tracker.log("a", 2, {"loss": 1.0})
    tracker.close()


def test_trackers_then_the_settings_accept_the_same_names() -> None:
    assert tuple(TRACKERS) == run_spec.TRACKERS


class Broken:
    """A tracker whose server went away."""

    def __init__(self) -> None:
        self.calls = 0

    def log(self, job: str, step: int, metrics: Mapping[str, float]) -> None:
        self.calls += 1
        raise ConnectionError("no route to host")

    def finish(self, job: str, state: str) -> None:
        self.calls += 1

    def close(self) -> None:
        self.calls += 1


class Recording(Broken):
    """A tracker that works."""

    def log(self, job: str, step: int, metrics: Mapping[str, float]) -> None:
        self.calls += 1


def test_trackers_when_one_breaks_then_it_is_dropped_with_one_warning_and_the_others_go_on() -> None:
    warnings: list[str] = []
    broken, fine = Broken(), Recording()
    trackers = Trackers({"wandb": broken, "tensorboard": fine}, warnings.append)
    trackers.record(step_done("a", 1))
    trackers.record(step_done("a", 2))
    trackers.record(JobSucceeded("a", 2, None))
    trackers.close()
    trackers.close()
    assert warnings == ["wandb stopped working and gets no more metrics: ConnectionError: no route to host"]
    assert (broken.calls, fine.calls) == (1, 4)


def test_trackers_when_an_event_has_no_metrics_then_they_do_not_get_it() -> None:
    recording = Recording()
    trackers = Trackers({"wandb": recording}, lambda text: None)
    for event in (CheckpointSaved("a", 1), MicrobatchDone(("a",), 90, 100, 0.1), JobWarning((), "beware")):
        trackers.record(event)
    assert recording.calls == 0


@pytest.mark.parametrize(("name", "module"), [("tensorboard", "tensorboard"), ("wandb", "wandb"), ("mlflow", "mlflow")])
def test_open_trackers_when_a_package_is_missing_then_it_names_the_extra(
    name: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for loaded in [m for m in sys.modules if m.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=rf"pip install -e '.*\[{name}\]'"):
        open_trackers([name], tmp_path, "evening")


def test_open_trackers_when_a_name_is_unknown_then_it_suggests_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean tensorboard"):
        open_trackers(["tensorbord"], tmp_path, "evening")
