"""A model directory that cannot be trained on is refused with one sentence, whatever is wrong with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import VOCABULARY, random_model

from weft.errors import ModelError
from weft.model.load import load_backbone
from weft.model.model_part import ModelPart
from weft.model.source import TINY, find_source
from weft.spec import BackboneSpec

WEIGHTS = "model.safetensors"
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}


def save(model: Any, path: Path) -> Path:
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, path / name)
    return path


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    return save(random_model("llama"), tmp_path_factory.mktemp("model") / "sound")


@pytest.fixture
def model_dir(sound, tmp_path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "model"))


def refusal(path: Path) -> str:
    """The sentence a directory is refused with."""
    with pytest.raises(ModelError) as caught:
        load_backbone(BackboneSpec(str(path), device="cpu"))
    text = str(caught.value)
    assert str(path) in text
    assert "\n" not in text
    assert len(caught.value.message) > 20, "a name alone explains nothing"
    return text


def change_config(path: Path, **settings: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **settings}))


def change_weights(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(path / WEIGHTS)
    change(tensors)
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})


def test_load_when_sound_then_gives_the_weights_of_the_files(sound):
    backbone = load_backbone(BackboneSpec(str(sound), device="cpu"))
    plain = random_model("llama").state_dict()
    for path, linear in backbone.linears.items():
        assert torch.equal(linear.weight, plain[f"{path}.weight"])
    assert backbone.name == str(sound)
    assert backbone.dtype == torch.float32


def test_load_when_tiny_then_it_is_there_without_a_path():
    backbone = load_backbone(BackboneSpec("tiny", dtype="bfloat16", device="cpu"))
    assert backbone.dtype == torch.bfloat16
    assert backbone.tokenizer.eos_token_id is not None


def test_load_when_the_family_is_untested_but_sound_then_it_is_checked_and_taken(tmp_path):
    config = transformers.Olmo2Config(**SIZES, **HEADS)
    path = save(transformers.Olmo2ForCausalLM(config), tmp_path / "olmo2")
    assert len(load_backbone(BackboneSpec(str(path), device="cpu")).linears) == 7


UNTRAINABLE = {
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=VOCABULARY, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    ),
    "bloom": lambda: transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=16, n_layer=1, n_head=2)
    ),
    "mamba": lambda: transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, state_size=4)
    ),
    "falcon": lambda: transformers.FalconForCausalLM(
        transformers.FalconConfig(
            vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, alibi=True
        )
    ),
    "vit": lambda: transformers.ViTModel(
        transformers.ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    ),
    "hrm_text": lambda: transformers.HrmTextForCausalLM(transformers.HrmTextConfig(**SIZES, **HEADS)),
    "xlnet": lambda: transformers.XLNetLMHeadModel(
        transformers.XLNetConfig(vocab_size=VOCABULARY, d_model=16, n_layer=1, n_head=2, d_inner=16)
    ),
    "llama4": lambda: transformers.Llama4ForCausalLM(
        transformers.Llama4TextConfig(**SIZES, **HEADS, intermediate_size_mlp=16, num_local_experts=2)
    ),
}
"""Models that Weft cannot train, by name."""


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("t5", "encoder-decoder"),
        ("bloom", "alibi"),
        ("mamba", "keeps a state that runs on from one sample into the next"),
        ("falcon", "falcon with alibi is not supported yet"),
        ("vit", "vit is no model that writes text from left to right"),
        ("hrm_text", "q_proj 6 times a pass"),
        ("xlnet", "lets a sample see the one before it"),
        ("llama4", "does not show which part of it is the decoder"),
    ],
)
def test_load_when_the_model_is_of_a_kind_that_cannot_be_trained_then_gives_the_reason(name, reason, tmp_path):
    assert reason in refusal(save(UNTRAINABLE[name](), tmp_path / "model")).removeprefix(str(tmp_path))


def test_load_when_a_weight_is_missing_then_names_it(model_dir):
    """Transformers would fill it with random numbers."""
    missing = "model.layers.1.mlp.up_proj.weight"
    change_weights(model_dir, lambda tensors: tensors.pop(missing))
    assert missing in refusal(model_dir)


def test_load_when_the_weights_are_of_another_model_then_refused(model_dir):
    save_file({"other.weight": torch.ones(3)}, model_dir / WEIGHTS, metadata={"format": "pt"})
    refusal(model_dir)


def test_load_when_a_weight_has_another_shape_then_names_it(model_dir):
    name = "model.layers.1.mlp.up_proj.weight"
    change_weights(model_dir, lambda tensors: tensors.update({name: torch.ones(3, 3)}))
    assert name in refusal(model_dir)


@pytest.mark.parametrize(
    "damage",
    [lambda data: b"no tensors here" * 40, lambda data: data[:-100], lambda data: b""],
    ids=["garbage", "cut short", "empty"],
)
def test_load_when_the_weights_file_is_damaged_then_refused(model_dir, damage):
    (model_dir / WEIGHTS).write_bytes(damage((model_dir / WEIGHTS).read_bytes()))
    refusal(model_dir)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"auto_map": {"AutoModelForCausalLM": "own.Model"}}, "auto_map"),
        ({"model_type": "nonesuch"}, "nonesuch"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"num_attention_heads": 5}, "heads"),
        ({"hidden_act": "nonesuch"}, "nonesuch"),
        ({"rope_parameters": {"rope_type": "nonesuch", "rope_theta": 1.0}}, "nonesuch"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_load_when_a_setting_of_config_json_is_bad_then_names_it(model_dir, settings, reason):
    change_config(model_dir, **settings)
    assert reason.lower() in refusal(model_dir).lower()


def test_load_when_the_weights_are_pickled_then_refused_with_the_way_to_convert_them(model_dir):
    (model_dir / WEIGHTS).unlink()
    torch.save({}, model_dir / "pytorch_model.bin")
    assert "no .safetensors weights. Convert its .bin files first." in refusal(model_dir)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: (path / WEIGHTS).unlink(), "no .safetensors weights"),
        (lambda path: (path / "config.json").unlink(), "no config.json"),
        (lambda path: (path / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda path: (path / "config.json").write_text("[]"), "names no model_type"),
        (lambda path: (path / "tokenizer.json").write_text("{}"), "tokenizer"),
        (lambda path: (path / "tokenizer.json").unlink(), "tokenizer"),
    ],
    ids=["no weights", "no config", "broken config", "config is a list", "broken tokenizer", "no tokenizer"],
)
def test_load_when_a_file_is_missing_or_broken_then_names_it(model_dir, damage, reason):
    damage(model_dir)
    assert reason in refusal(model_dir)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        (WEIGHTS, POINTER, f"{WEIGHTS} is a Git LFS pointer, not the file itself; run `git lfs pull`"),
        ("config.json", POINTER, "config.json is a Git LFS pointer"),
        ("tokenizer.json", POINTER, "tokenizer.json is a Git LFS pointer"),
        (WEIGHTS, b"no tensors here" * 40, f"{WEIGHTS} is not a safetensors file"),
        (INDEX, b"[]", f"{INDEX} does not list which file has which weights"),
        (INDEX, b'{"weight_map": {"x": "b", "y": "a", "z": "c"}}', f"a, which {INDEX} names, is not there, nor are 2"),
    ],
)
def test_load_when_a_file_is_not_what_its_name_means_then_reports_what_it_is(model_dir, name, content, reason):
    (model_dir / name).write_bytes(content)
    assert reason in refusal(model_dir)


def test_load_when_the_weights_are_cut_short_then_reports_how_much_is_there(model_dir):
    content = (model_dir / WEIGHTS).read_bytes()
    (model_dir / WEIGHTS).write_bytes(content[:-100])
    assert f"{WEIGHTS} has {len(content) - 100} bytes; its header needs {len(content)}" in refusal(model_dir)


@pytest.mark.parametrize("name", ["./nowhere", "/no/where", "nonesuch", "a/b/c"])
def test_load_when_there_is_no_such_directory_then_reports_what_is_accepted(name):
    with pytest.raises(ModelError, match="accepted are tiny, smollm2"):
        find_source(name)


def test_load_when_the_path_is_a_file_then_refused_in_favour_of_the_directory(sound):
    with pytest.raises(ModelError, match="is a file; give the model's directory"):
        find_source(str(sound / WEIGHTS))


def test_load_when_cuda_is_chosen_and_absent_then_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelError, match="cuda needs a GPU, and torch sees none"):
        load_backbone(BackboneSpec("tiny", device="cuda"))


@pytest.mark.parametrize(("has_own_head", "is_tied"), [(None, True), (False, True), (True, False)])
def test_part_when_files_have_a_head_that_is_not_the_embedding_then_both_are_two_on_every_stage(
    has_own_head, is_tied, tmp_path
):
    """Regardless of config.json: transformers ties a whole model by the numbers that it finds."""
    path = save(random_model("llama_tied"), tmp_path / "model")
    weights = load_file(path / WEIGHTS)
    if has_own_head is not None:
        embedding = weights["model.embed_tokens.weight"]
        weights["lm_head.weight"] = torch.randn_like(embedding) if has_own_head else embedding.clone()
        save_file(weights, path / WEIGHTS, metadata={"format": "pt"})
    spec = BackboneSpec(str(path), device="cpu")
    parts = (None, ModelPart(0, 2, 2), ModelPart(0, 1, 2), ModelPart(1, 2, 2))
    assert [load_backbone(spec, part).embeddings.is_tied for part in parts] == [is_tied] * 4


def test_whole_model_when_transformers_has_no_text_model_for_it_then_refused(model_dir):
    text = {"model_type": "clip_text_model"}
    change_config(model_dir, model_type="clip", text_config=text, vision_config={}, architectures=["CLIPModel"])
    assert "has no model for the text part (clip_text_model) of clip alone" in refusal(model_dir)
