"""An adapter of the text model of a vision-language model is exported with the names of the class that is served, and
merged into the whole model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from tiny_wholes import WHOLES, whole_model
from transformers import AutoModelForImageTextToText

from weft.adapters.method import ModuleTensors
from weft.adapters.parts import OUTPUT_ROWS
from weft.engine.inference.attach import StoredAdapter
from weft.engine.inference.merge import merge_adapter
from weft.model.load import load_backbone, load_plain_model
from weft.model.packing.experts import expert_products_of
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


def logits(path: Path) -> torch.Tensor:
    """Of the whole model, without an image."""
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 20)[None]).logits


@pytest.mark.parametrize("parts", [1, 3])
def test_merge_when_the_base_is_a_whole_model_then_all_but_its_text_model_stays(weft, whole, adapter, tmp_path, parts):
    base, before = tmp_path / "base", load_file(whole / "model.safetensors")
    AutoModelForImageTextToText.from_pretrained(whole).save_pretrained(
        base, max_shard_size=sum(tensor.nbytes for tensor in before.values()) // parts + 1024
    )
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(whole / file, base / file)
    (base / "preprocessor_config.json").write_text('{"size": 28}')
    result = weft("merge", adapter, "--out", tmp_path / "merged", "--base-model", base)
    assert result.code == 0, result
    files = sorted(file.name for file in (tmp_path / "merged").glob("*.safetensors"))
    assert files == sorted(file.name for file in base.glob("*.safetensors")) and len(files) >= parts
    after = {name: x for file in files for name, x in load_file(tmp_path / "merged" / file).items()}
    assert after.keys() == before.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.startswith("language_model") and "_proj" in name}
    assert (tmp_path / "merged" / "preprocessor_config.json").read_text() == '{"size": 28}'
    alone = peft.PeftModel.from_pretrained(load_plain_model(BackboneSpec(str(whole), "float32", "cpu")), adapter).eval()
    with torch.no_grad():
        expected = alone(input_ids=torch.arange(3, 20)[None]).logits
    assert (logits(tmp_path / "merged") - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert load_backbone(BackboneSpec(str(tmp_path / "merged"), "float32", "cpu")).linears


def merge_random(name: str, folder: Path, settings: AdapterSpec) -> dict[str, ModuleTensors]:
    """Merges a random adapter into a tiny whole model."""
    base = folder / "base"
    whole_model(name).save_pretrained(base)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / file, base / file)
    spec = BackboneSpec(str(base), "float32", "cpu")
    made = load_backbone(spec).new_adapter(settings, 0)
    generator = torch.Generator().manual_seed(1)
    made.put({path: torch.randn(x.shape, generator=generator) for path, x in made.flat().items()})
    merge_adapter(StoredAdapter("a", base, settings, made.tensors(), str(base)), spec, folder / "merged")
    return made.tensors()


@pytest.mark.parametrize("name", WHOLES)
def test_merge_when_an_adapter_has_a_head_of_its_own_then_the_whole_model_gets_it(name, tmp_path):
    """Also where the head was the embedding."""
    tensors = merge_random(name, tmp_path, AdapterSpec(r=2, target_modules=("q_proj",), modules_to_save=("lm_head",)))
    again = load_backbone(BackboneSpec(str(tmp_path / "merged"), "float32", "cpu"))
    (head,) = tensors[OUTPUT_ROWS]
    assert torch.equal(again.model.lm_head.weight, head)
    assert not torch.equal(again.model.get_input_embeddings().weight, head)
    assert logits(tmp_path / "merged").isfinite().all()


def test_merge_when_files_have_one_expert_after_the_other_then_each_is_changed(tmp_path):
    settings = AdapterSpec(r=2, target_modules=("q_proj",), experts="full")
    tensors = merge_random("qwen3_5_moe", tmp_path, settings)
    before, after = (
        expert_products_of(load_plain_model(BackboneSpec(str(tmp_path / name), "float32", "cpu")))
        for name in ("base", "merged")
    )
    merged = [path for path in before if path in tensors]
    assert len(merged) == 4
    for path in merged:
        a_ERD, b_EOR = tensors[path]
        expected = before[path][1] + settings.scale_for(path) * (b_EOR @ a_ERD)
        torch.testing.assert_close(after[path][1], expected)
    names = load_file(tmp_path / "merged" / "model.safetensors").keys()
    assert "model.language_model.layers.0.mlp.experts.3.up_proj.weight" in names
    assert names == load_file(tmp_path / "base" / "model.safetensors").keys()
