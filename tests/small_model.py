"""A random model with the embedded backbone's tokenizer, whose steps take a millisecond or two per layer."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from weft.model.source import TINY

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_FOLDER = tempfile.TemporaryDirectory(prefix="weft-small-")
"""Removed when this process ends."""


@functools.cache
def small_model(num_layers: int = 1) -> Path:
    """Its directory."""
    folder = Path(_FOLDER.name, str(num_layers))
    folder.mkdir()
    for file in TINY.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copyfile(file, folder / file.name)
    config = json.loads((TINY / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **SIZES, "num_hidden_layers": num_layers}))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model.save_pretrained(folder)
    return folder
