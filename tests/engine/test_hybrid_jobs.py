"""Runs on models whose layers have states: stopped and continued, loaded by PEFT, merged; what stays frozen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from tiny_families import plain_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from weft.data.samples import Sample
from weft.engine.events import Event, StepDone
from weft.engine.inference.attach import attach_adapter, read_stored
from weft.engine.inference.merge import merge_adapter
from weft.engine.resume import plan_resume
from weft.engine.train import execute_run, prepare_run
from weft.errors import ConfigError
from weft.model.load import load_backbone
from weft.model.packed import SlotSample, pack_samples
from weft.model.source import TINY
from weft.spec import BackboneSpec, RunSpec, run_from_mapping
from weft.store.run_dir import RunDirectory

NAMES = ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "lfm2", "lfm2_moe", "granitemoehybrid_mamba", "nemotron_h"]
NAMES += ["bamba", "falcon_h1", "mamba2"]
IDS = [5, 9, 14, 33, 7, 8]


class StopError(Exception):
    pass


def run_of(where: Path, name: str, **adapter: Any) -> RunSpec:
    """Two jobs on a tiny model in a directory, whose adapters have these settings too."""
    plain_model(name, vocab_size=512).save_pretrained(where / "model")
    AutoTokenizer.from_pretrained(TINY).save_pretrained(where / "model")
    rows = [{"prompt": f"name {i}", "completion": f"{i} it is"} for i in range(8)]
    (where / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared: dict[str, Any] = {"train_data": str(where / "rows.jsonl"), "max_steps": 3, "global_batch_size": 3}
    shared |= {"save_steps": 1, "max_length": 64}
    jobs = [
        {"name": job, "adapter": {"r": r, **adapter}, "learning_rate": 0.02, **shared}
        for job, r in (("a", 2), ("b", 3))
    ]
    return run_from_mapping({"base_model": str(where / "model"), "device": "cpu", "jobs": jobs})


def train(spec: RunSpec, where: Path, run: str, *, stop: bool = False) -> None:
    def on_event(event: Event) -> None:
        if stop and isinstance(event, StepDone) and event.step == 2:
            raise StopError

    with RunDirectory.open(where / run, resume=RunDirectory.holds_run(where / run)) as directory:
        if RunDirectory.holds_run(where / run):
            plan_resume(spec, directory)
        execute_run(prepare_run(spec, base_dir=where), directory, on_event=on_event)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=torch.tensor([IDS])).logits[0]


def assert_close(mine: torch.Tensor, other: torch.Tensor) -> None:
    assert (mine - other).abs().max() <= 1e-5 * other.abs().max()


@pytest.mark.parametrize("name", NAMES)
def test_adapter_when_trained_then_peft_loads_it_and_a_merged_model_has_its_logits(name, tmp_path):
    spec = run_of(tmp_path, name)
    train(spec, tmp_path, "run")
    stored = read_stored(tmp_path / "run" / "b")
    backbone = load_backbone(spec.backbone)
    slot = attach_adapter(backbone, stored)
    sample = SlotSample(Sample(np.array(IDS, np.int32), np.zeros(len(IDS), bool)), slot)
    mine = backbone.logits(pack_samples([sample], None, backbone.device))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager")
    bare = logits(plain)
    loaded = peft.PeftModel.from_pretrained(plain, str(stored.path))
    assert_close(mine, logits(loaded))
    assert (mine - bare).abs().max() > 1e-2 * bare.abs().max(), "the adapter changes nothing"
    merge_adapter(stored, BackboneSpec(str(tmp_path / "model"), device="cpu"), tmp_path / "merged")
    assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager")), mine)


@pytest.mark.parametrize(
    ("name", "experts"),
    [("qwen3_5_text", "none"), ("lfm2", "none"), ("granitemoehybrid_mamba", "shared"), ("qwen3_moe", "full")],
)
def test_run_when_stopped_then_continues_to_the_bits_of_a_whole_one(name, experts, tmp_path):
    spec = run_of(tmp_path, name, experts=experts)
    train(spec, tmp_path, "whole")
    with pytest.raises(StopError):
        train(spec, tmp_path, "stopped", stop=True)
    train(spec, tmp_path, "stopped")
    for job in "ab":
        whole, stopped = (tmp_path / run / job / "adapter/adapter_model.safetensors" for run in ("whole", "stopped"))
        assert whole.read_bytes() == stopped.read_bytes()


@pytest.mark.parametrize(
    ("adapter", "sentence"),
    [
        ({"method": "prefix_tuning"}, "has no .* to adapt"),
        ({"method": "bottleneck"}, "has no .* to adapt"),
    ],
)
def test_method_when_a_hybrid_has_no_sites_for_it_then_one_sentence(adapter, sentence, tmp_path):
    spec = run_of(tmp_path, "qwen3_5_text")
    jobs: list[Any] = [
        {"name": "a", "max_length": 64, "train_data": str(tmp_path / "rows.jsonl"), "max_steps": 1, "adapter": adapter}
    ]
    other = run_from_mapping({"base_model": spec.base_model, "device": "cpu", "jobs": jobs})
    with pytest.raises(ConfigError, match=sentence):
        prepare_run(other, base_dir=tmp_path)
