"""Every version of the openai SDK that people have gets the same answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from service_process import PATIENCE_S, Service, Wish

TOUR = Path(__file__).parent / "sdk_tour.py"
OLDER = Path(sys.prefix) / "sdk"
"""Where `make setup` puts older versions."""
VERSIONS = {"1": OLDER / "1", "2": OLDER / "2", "3": None}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = Service(tmp_path / "data")
    for version in VERSIONS:
        made.add_tenant(f"v{version}")
    made.start()
    yield made
    assert made.stop() == 0


def test_sdks_when_of_three_versions_then_all_get_the_same_answers(service: Service, tmp_path: Path):
    (tmp_path / "train.jsonl").write_bytes(Wish("tour", seed=1, max_steps=1).data)
    tours = {version: tour(service, version, packages, tmp_path) for version, packages in VERSIONS.items()}
    reports = {version: answers(process) for version, process in tours.items()}
    for version, found in reports.items():
        assert found.pop("version").startswith(f"{version}.")
        assert found["models"].pop("owner") == f"v{version}"
        assert found["jobs"]["job"][4].pop("by").startswith(f"{version}.")
        assert found == EXPECTED, version


def tour(service: Service, version: str, packages: Path | None, tmp_path: Path) -> subprocess.Popen[str]:
    assert packages is None or (packages / "openai").is_dir(), f"{packages} is not there; run: make setup"
    environment = {**os.environ, "PYTHONPATH": str(packages or "")}
    url, key = f"http://127.0.0.1:{service.port}/v1", service.keys[f"v{version}"]
    command = [sys.executable, str(TOUR), url, key, str(tmp_path / "train.jsonl")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def answers(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=2 * PATIENCE_S)
    assert process.returncode == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


EXPECTED: dict[str, Any] = {
    "files": {
        "file": ["file", "train.jsonl", 998, "fine-tune", True],
        "waited": "processed",
        "listed": True,
        "content": True,
        "deleted": True,
        "gone": ["NotFoundError", 404, None, "file_id"],
        "bad": ["BadRequestError", 400, "invalid_training_file", "file"],
    },
    "jobs": {
        "steered": ["fine_tuning.job", "paused", "queued", "fine_tuning.job", "cancelled"],
        "job": ["fine_tuning.job", "succeeded", 5, "tiny", {}, None, True],
        # The tour sets max_steps as well, so epochs are not what ends the job.
        "hyperparameters": {"batch_size": 1, "learning_rate_multiplier": 10.0},
        "tokens": True,
        "extra": {"r": 4},
        "events": ["message", *["metrics"] * 3, *["message"] * 4],
        "checkpoints": [3],
        "listed": True,
        "results": "step,train_loss,train_accuracy,valid_loss,valid_mean_token_accuracy",
        "bad": ["BadRequestError", 400, "model_not_found", "model"],
        "reinforcement": ["BadRequestError", 400, "unsupported_method", "method.type"],
        "gone": ["NotFoundError", 404, None, "fine_tuning_job_id"],
    },
    "models": {
        "listed": True,
        "chat": True,
        "completion": ["text_completion", "length"],
        "deleted": True,
        "gone": ["NotFoundError", 404, "model_not_found", "model"],
    },
    "stranger": ["AuthenticationError", 401, "invalid_api_key", None],
}
