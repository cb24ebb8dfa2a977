"""The text model in the files of a vision-language model is loaded alone, with the bits of its own files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_families import FAMILIES, model_type, plain_model
from tiny_models import random_sample
from tiny_wholes import save_both, whole_model
from torch import nn

from weft.model.load import OriginalWeights, load_backbone, load_plain_model
from weft.model.packed import SlotSample, pack_samples
from weft.model.source import TINY, load_tokenizer
from weft.plan.weights import WEIGHTS
from weft.spec import AdapterSpec, BackboneSpec

TRAINED = ["gemma3", "mistral3", "mistral3_untied"]


def directories(name: str, folder: Path) -> tuple[Path, Path]:
    paths = save_both(name, folder)
    for path in paths:
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TINY / file, path / file)
    return paths


@pytest.mark.parametrize("name", TRAINED)
def test_whole_model_when_trained_on_text_then_has_the_bits_of_its_text_model(name, tmp_path):
    found = []
    for path in directories(name, tmp_path):
        backbone = load_backbone(BackboneSpec(str(path), "float32", "cpu"))
        adapter = backbone.new_adapter(AdapterSpec(r=3, init_lora_weights=False), 0)
        sample = random_sample(np.random.default_rng(0), 17, high=60)
        batch = pack_samples([SlotSample(sample, backbone.attach(adapter))], 128, backbone.device)
        losses = backbone.forward_backward(batch, 128)
        found.append((losses, list(backbone.linears), [group.grad.clone() for group in adapter.groups.values()]))
    assert found[0][:2] == found[1][:2]
    assert all(torch.equal(*pair) for pair in zip(found[0][2], found[1][2], strict=True))
    assert not any("language_model" in path or "vision" in path for path in found[0][1])


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "mistral3_untied", "qwen3_5"])
def test_whole_model_when_its_text_model_is_read_then_gives_its_logits(name, tmp_path):
    path, _ = directories(name, tmp_path)
    ids_1T = torch.arange(3, 20)[None]
    text, whole = load_plain_model(BackboneSpec(str(path), "float32", "cpu")), whole_model(name)
    with torch.no_grad():
        assert torch.equal(text(input_ids=ids_1T).logits, whole(input_ids=ids_1T).logits)
    files = OriginalWeights("mine", str(path), "model", torch.float32)
    for linear in ("model.layers.1.mlp.down_proj", *(() if text.config.tie_word_embeddings else ("lm_head",))):
        weight_OD = text.get_submodule(linear).weight
        assert torch.equal(files.find(linear, tuple(weight_OD.shape)), weight_OD)


def test_template_when_only_the_processor_has_one_then_the_tokenizer_has_it(tmp_path):
    shutil.copytree(TINY, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "model" / "chat_template.json").write_text(json.dumps({"chat_template": "hello"}))
    assert load_tokenizer(str(tmp_path / "model")).chat_template == "hello"


@pytest.mark.parametrize("name", [name for name in FAMILIES if model_type(name) in WEIGHTS])
def test_weights_when_a_family_has_names_of_its_own_in_files_then_are_found(name, tmp_path):
    model = plain_model(name)
    model.save_pretrained(tmp_path)
    files = OriginalWeights("mine", str(tmp_path), model.base_model_prefix, torch.float32)
    linears = {
        path: module.weight for path, module in model.base_model.named_modules() if isinstance(module, nn.Linear)
    }
    for path, weight in linears.items():
        assert torch.equal(files.find(f"{model.base_model_prefix}.{path}", tuple(weight.shape)), weight)
