"""A small sweep in a folder of its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from weft.cli.skills import SKILLS
from weft.model.source import TINY

Settings = Callable[..., dict[str, Any]]
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with one random layer and its own tokenizer: a step takes a millisecond or two."""
    folder = tmp_path_factory.mktemp("model")
    for file in TINY.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copyfile(file, folder / file.name)
    config = {**json.loads((TINY / "config.json").read_text()), **SMALL}
    (folder / "config.json").write_text(json.dumps(config))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def settings(tmp_path: Path, small_model: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings of a sweep of four trials of nine steps in the working directory, with changes."""
    monkeypatch.chdir(tmp_path)
    rows = "".join(json.dumps(row) + "\n" for row in SKILLS["shout"].rows(0, 24))
    (tmp_path / "rows.jsonl").write_text(rows)

    def make(**changes: Any) -> dict[str, Any]:
        shared = {"train_data": "rows.jsonl", "eval_data": 6, "max_length": 48, "max_steps": 9, "global_batch_size": 2}
        base = {
            "base_model": str(small_model),
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
