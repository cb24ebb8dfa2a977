"""Every command that takes a LoRA takes an IA³, trained beside LoRAs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from weft.cli.demo import SKILLS

JOBS = """\
base_model: tiny
output_dir: out
capacity: 128
kernels: fused
defaults: {train_data: rows.jsonl, eval_data: 2, max_length: 48, max_steps: 2, global_batch_size: 2}
jobs:
  - {name: scales, adapter: {method: ia3}}
  - {name: ranks, adapter: {r: 2}}
"""
SWEEP = """\
base_model: tiny
output_dir: swept
capacity: 128
compare_speed: false
job:
  {train_data: rows.jsonl, eval_data: 2, max_length: 48, max_steps: 2, global_batch_size: 2, adapter: {alpha: 4}}
space: {method: [ia3, lora], r: [2, 4]}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SKILLS["shout"].rows(0, 12)))
    (tmp_path / "jobs.yaml").write_text(JOBS)
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    return tmp_path


def test_commands_when_the_adapter_is_ia3_then_they_take_it(weft, refused, folder):
    assert weft("train", "jobs.yaml").code == 0
    config = json.loads((folder / "out/scales/adapter/adapter_config.json").read_text())
    assert (config["peft_type"], config["feedforward_modules"]) == ("IA3", ["down_proj"])
    assert weft("chat", "--adapter", "out/scales", typed="hello\n").code == 0
    assert "scales" in weft("eval", "--adapter", "out/scales", "--data", "rows.jsonl", "--limit", "2").out
    assert "PeftModel.from_pretrained" in weft("export", "out/scales", "--for", "peft").out
    assert "vLLM takes LoRA adapters only" in refused("export", "out/scales", "--for", "vllm")
    assert weft("merge", "out/scales", "--out", "merged").code == 0


def test_config_when_a_job_is_ia3_then_what_is_printed_is_a_jobs_file(weft, folder):
    printed = weft("config", "jobs.yaml").out
    (folder / "again.yaml").write_text(printed)
    assert yaml.safe_load(weft("config", "again.yaml").out) == yaml.safe_load(printed)


def test_sweep_when_the_method_is_searched_then_ranks_are_tried_of_lora_only(weft, folder):
    """The two points with IA³ differ in nothing that applies to it, so it is trained once."""
    assert "3 points" in weft("sweep", "sweep.yaml").out
    kinds = [json.loads(f.read_text())["peft_type"] for f in (folder / "swept").rglob("adapter_config.json")]
    assert "IA3" in kinds or "LORA" in kinds
    board = json.loads((folder / "swept" / "leaderboard.json").read_text())
    tried = sorted((trial["params"] for trial in board["trials"]), key=str)
    assert tried == [{"method": "ia3"}, {"method": "lora", "r": 2}, {"method": "lora", "r": 4}]


def test_sweep_when_a_parameter_is_of_no_method_in_the_space_then_refused_in_one_sentence(refused, folder):
    (folder / "sweep.yaml").write_text(SWEEP.replace("[ia3, lora]", "[ia3]"))
    assert "space.r: is a setting of lora and dora; the method is ia3." in refused("sweep", "sweep.yaml")
