"""Short runs on a GPU through the command line, as a user starts them."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file
from tiny_tokenizer import make_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig

WORDS = ("warp", "weft", "loom", "yarn", "shed", "reed", "heddle", "shuttle", "selvage", "twill")


def write_model(folder: Path, *, num_layers: int = 2) -> Path:
    """A random llama with a byte-level tokenizer, wide enough for every kernel."""
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_jobs(folder: Path, model: Path, jobs: dict[str, dict[str, Any]], **settings: Any) -> Path:
    """A jobs file with its data; every job has rows of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    listed = []
    for name, own in jobs.items():
        drawn = random.Random(name)
        rows = [" ".join(drawn.choices(WORDS, k=drawn.randint(5, 60))) for _ in range(24)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
        listed.append({"name": name, "train_data": f"{name}.jsonl", "max_length": 512, **own})
    run = {"base_model": str(model), "output_dir": str(folder / "run"), "device": "cuda", "jobs": listed, **settings}
    path = folder / "jobs.yaml"
    path.write_text(yaml.safe_dump(run))
    return path


def start(jobs: Path, *options: str) -> subprocess.Popen[str]:
    """`weft train` in a process of its own."""
    command = [sys.executable, "-m", "weft", "train", str(jobs), *options]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def train(jobs: Path, *options: str) -> str:
    """Trains to the end; returns what was printed."""
    process = start(jobs, *options)
    printed, _ = process.communicate(timeout=500)
    assert process.returncode == 0, printed
    return printed


def weights(jobs: Path, name: str) -> dict[str, torch.Tensor]:
    """The adapter that a run wrote for a job."""
    return load_file(jobs.parent / "run" / name / "adapter" / "adapter_model.safetensors")


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether two adapters are equal in every bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
