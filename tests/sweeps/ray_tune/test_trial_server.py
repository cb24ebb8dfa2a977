"""Trials on one backbone stand still after each evaluation, and end with the bytes they would have alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.engine.engine import Engine
from weft.errors import ConfigError, JobError
from weft.spec.load_sweep import sweep_from_mapping, trial_job
from weft.spec.sweep import SweepSpec
from weft.sweeps.ray_tune.trial_server import TrialNews, TrialServer

WORDS = ["warp", "Weft", "loom", "Yarn", "shed", "Reed", "heddle", "Shuttle", "selvage", "Twill"]


@pytest.fixture
def spec(tmp_path: Path) -> SweepSpec:
    rows = [{"prompt": f"{word}\n", "completion": word.upper()} for word in WORDS]
    (tmp_path / "upper.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = {"train_data": "upper.jsonl", "eval_data": 2, "max_steps": 5, "eval_steps": 2, "max_length": 48}
    job |= {"global_batch_size": 4, "adapter": {"r": 4, "target_modules": ["q_proj"]}}
    tree = {"base_model": "tiny", "job": job, "space": {"learning_rate": [1e-4]}, "capacity": 96, "device": "cpu"}
    return sweep_from_mapping(tree, base_dir=tmp_path)


@pytest.fixture
def server(spec: SweepSpec, tmp_path: Path) -> Iterator[TrialServer]:
    found = TrialServer(spec, tmp_path / "out", tmp_path, {})
    found.wait_until_loaded()
    yield found
    found.close()


def next_news(server: TrialServer, name: str) -> TrialNews:
    """The news of a trial's next iteration."""
    server.go_on(name)
    while True:
        news = server.news(name)
        if news is not None:
            return news


def test_trials_when_they_train_together_then_each_reports_its_evaluations_and_has_the_bytes_it_has_alone(
    server, spec, tmp_path
):
    params = {"a": {"learning_rate": 1e-2}, "b": {"learning_rate": 1e-3, "r": 2}}
    for name, values in params.items():
        server.submit(name, values)
    reported = {name: [next_news(server, name) for _ in range(3)] for name in params}
    for name, values in params.items():
        assert [news.metrics["step"] for news in reported[name]] == [2, 4, 5]
        assert [news.is_ended for news in reported[name]] == [False, False, True]
        alone = Engine("tiny", capacity=96)
        alone.keep_in(tmp_path / f"alone-{name}")
        alone.submit(trial_job(spec, name, values), base_dir=tmp_path)
        alone.run()
        adapter = Path(reported[name][-1].metrics["adapter"]) / "adapter_model.safetensors"
        assert adapter.read_bytes() == (tmp_path / f"alone-{name}" / name / "adapter" / adapter.name).read_bytes()


def test_trial_when_it_is_cancelled_then_has_taken_no_step_beyond_what_was_reported(server, tmp_path):
    server.submit("stopped", {})
    assert next_news(server, "stopped").metrics["step"] == 2
    server.cancel("stopped")
    end = server.news("stopped")
    assert end is not None and end.is_ended and end.error is None
    status = json.loads((tmp_path / "out" / "stopped" / "status.json").read_text())
    assert (status["state"], status["step"]) == ("cancelled", 2)
    server.cancel("stopped")
    with pytest.raises(JobError, match="stopped: has ended; schedulers that pause and restore trials cannot be used"):
        server.submit("stopped", {})


def test_trial_when_its_settings_are_wrong_then_is_refused_and_others_go_on(server):
    server.submit("good", {})
    with pytest.raises(ConfigError, match="no_such_setting"):
        server.submit("bad", {"no_such_setting": 1})
    assert next_news(server, "good").metrics["step"] == 2
