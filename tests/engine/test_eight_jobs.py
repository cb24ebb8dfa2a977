"""One run of eight jobs that differ in method, objective and optimizer: each is as if alone, and can be used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import peft
import pytest
import torch
from eight_jobs import JOBS

from weft.data.samples import Sample
from weft.engine.inference.attach import load_with_adapters
from weft.methods.registry import method_of
from weft.model.load import load_plain_model
from weft.model.packed import SlotSample, pack_samples
from weft.spec import AdapterSpec, BackboneSpec

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parent / "killed_run.py"
TOKENS = [40, 51, 62, 33, 74, 45]
IN_PEFT = [
    name
    for name, job in JOBS.items()
    if method_of(AdapterSpec(**job["adapter"])).files.in_peft and "objective" not in job
]
"""Language models whose method PEFT has."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The runs of all together, killed again and again or left alone, and of each by itself."""
    folder = tmp_path_factory.mktemp("eight")
    command = [sys.executable, str(SCRIPT), str(folder), "7", "eight"]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False, env=one_thread)
    assert finished.returncode == 0, finished.stderr
    ends = json.loads(finished.stdout)
    assert ends[-1] == "done" and ends.count("killed") == len(ends) - 1 >= 5, finished.stderr
    return folder


@pytest.mark.faults
@pytest.mark.parametrize("name", JOBS)
def test_job_when_trained_beside_seven_others_then_has_the_bytes_it_has_alone_and_after_kills(runs, name):
    folders = [runs / run / name / "adapter" for run in ("undisturbed", f"alone-{name}", "killed")]
    together, alone, killed = ({file.name: file.read_bytes() for file in folder.iterdir()} for folder in folders)
    assert "adapter_model.safetensors" in together
    assert together == alone == killed
    losses = [json.loads(line).get("loss") for line in (folders[0].parent / "metrics.jsonl").read_text().splitlines()]
    assert len([loss for loss in losses if loss is not None]) == 6


@pytest.mark.parametrize("name", IN_PEFT)
def test_adapter_when_peft_has_its_method_then_computes_the_same_there(runs, name):
    folder = runs / "undisturbed" / name / "adapter"
    loaded = load_with_adapters([str(folder)], base_model="tiny", device="cpu")
    (slot,) = (slot for slot in loaded.slots.values() if slot is not None)
    backbone = loaded.backbone
    leading = backbone.leading_rows(slot)
    sample = Sample(TOKENS, [False] * len(TOKENS)).led_by(leading)
    ours = backbone.logits(pack_samples([SlotSample(sample, slot)], None, backbone.device))[leading:]
    model = peft.PeftModel.from_pretrained(load_plain_model(BackboneSpec("tiny", device="cpu")), folder)
    with torch.no_grad():
        theirs = model(torch.tensor([TOKENS])).logits[0][-len(TOKENS) :]
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=1e-4, atol=1e-4)
