"""A small sweep in a folder of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_model import small_model

from weft.cli.demo import SKILLS

Settings = Callable[..., dict[str, Any]]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings of a sweep of four trials of nine steps in the working directory, with changes."""
    monkeypatch.chdir(tmp_path)
    rows = "".join(json.dumps(row) + "\n" for row in SKILLS["shout"].rows(0, 24))
    (tmp_path / "rows.jsonl").write_text(rows)

    def make(**changes: Any) -> dict[str, Any]:
        shared = {"train_data": "rows.jsonl", "eval_data": 6, "max_length": 48, "max_steps": 9, "global_batch_size": 2}
        base = {
            "base_model": str(small_model()),
            "device": "cpu",
            "capacity": 128,
            "output_dir": "out",
            "compare_speed": False,
            "early_stop": "none",
            "job": {**shared, "adapter": {"r": 2, "dropout": 0.1}, **changes.pop("job", {})},
            "space": {"lr": [1e-3, 8e-3], "r": [2, 4]},
        }
        return base | changes

    return make
