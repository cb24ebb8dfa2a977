"""An adapter of the text model of a vision-language model is exported with the names of the class that is served."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from tiny_wholes import whole_model
from transformers import AutoModelForImageTextToText

from weft.model.load import load_backbone, load_plain_model
from weft.model.source import TINY
from weft.spec import AdapterSpec, BackboneSpec
from weft.store.peft_files import read_adapter, write_adapter

LONG = "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "model"
    whole_model("gemma3").save_pretrained(path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / file, path / file)
    return path


@pytest.fixture(scope="module")
def adapter(whole, tmp_path_factory) -> Path:
    backbone = load_backbone(BackboneSpec(str(whole), "float32", "cpu"))
    made = backbone.new_adapter(AdapterSpec(r=3, init_lora_weights=False), 0)
    tensors = {name: (module.a_RD, module.b_OR) for name, module in made.modules.items()}
    path = tmp_path_factory.mktemp("adapter") / "adapter"
    write_adapter(path, made.spec, tensors, base_model=str(whole), target_names=list(tensors))
    return path


def test_export_when_the_server_loads_the_whole_model_then_names_are_its_names(weft, refused, adapter, tmp_path):
    assert "add --out DIR" in refused("export", adapter, "--for", "vllm")
    assert weft("export", adapter, "--for", "vllm", "--out", tmp_path / "served").code == 0
    assert LONG in load_file(tmp_path / "served" / "adapter_model.safetensors")
    config = json.loads((tmp_path / "served" / "adapter_config.json").read_text())
    assert all(name.startswith("model.language_model.layers.") for name in config["target_modules"])
    again, first = read_adapter(tmp_path / "served")[1], read_adapter(adapter)[1]
    assert again.keys() == first.keys()
    assert all(torch.equal(x, y) for name in first for x, y in zip(first[name], again[name], strict=True))


def test_export_when_peft_loads_the_whole_model_then_it_computes_what_the_text_model_does(
    weft, whole, adapter, tmp_path
):
    result = weft("export", adapter, "--for", "peft", "--out", tmp_path / "peft")
    assert "AutoModelForImageTextToText" in result.out
    model = AutoModelForImageTextToText.from_pretrained(whole)
    with_adapter = peft.PeftModel.from_pretrained(model, tmp_path / "peft").eval()
    alone = peft.PeftModel.from_pretrained(load_plain_model(BackboneSpec(str(whole), "float32", "cpu")), adapter).eval()
    ids_1T = torch.arange(3, 20)[None]
    with torch.no_grad():
        found, expected = with_adapter(input_ids=ids_1T).logits, alone(input_ids=ids_1T).logits
        with with_adapter.disable_adapter():
            bare = with_adapter(input_ids=ids_1T).logits
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (bare - expected).abs().max() > 1e-2 * expected.abs().max()


def test_adapter_when_peft_trained_it_on_the_whole_model_then_it_fits_the_text_model(whole, tmp_path):
    model = AutoModelForImageTextToText.from_pretrained(whole)
    config = peft.LoraConfig(r=2, target_modules=r".*language_model.*\.(q_proj|down_proj)", init_lora_weights=False)
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "theirs")
    spec, tensors, _ = read_adapter(tmp_path / "theirs")
    backbone = load_backbone(BackboneSpec(str(whole), "float32", "cpu"))
    assert list(backbone.stored_adapter(spec, tensors).modules) == list(tensors)
    assert sorted(tensors)[0] == "model.layers.0.mlp.down_proj"
