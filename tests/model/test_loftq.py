"""LoftQ starts an adapter as the nearest thing to what a quantised backbone has lost, and reads that from its files."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.utils.loftq_utils import _low_rank_decomposition
from safetensors.torch import load_file, save_file
from tiny_models import assert_same_bits, finish, job_spec, random_data, random_model, submit
from transformers import AutoTokenizer

from weft.adapters.frozen import Dense
from weft.engine.engine import Engine
from weft.errors import ConfigError, ModelError
from weft.model.load import load_backbone
from weft.model.source import TINY
from weft.spec import AdapterSpec, BackboneSpec, RunSpec, run_from_mapping
from weft.store.peft_files import read_adapter

RANK = 4
SPEC = AdapterSpec(r=RANK, lora_alpha=6, init_lora_weights="loftq", rank_pattern={"v_proj": 2})


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers in files of its own."""
    path = tmp_path_factory.mktemp("models") / "llama"
    random_model("llama_bias").save_pretrained(path)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(path)
    return path


def errors(directory: Path, quantize: str, **settings: Any) -> dict[str, tuple[float, float, float]]:
    """By module: how far the stored weight is from the one in the files, with the adapter, and at best."""
    backbone = load_backbone(BackboneSpec(str(directory), quantize=quantize, **settings))
    files = load_file(directory / "model.safetensors")
    adapter = backbone.new_adapter(SPEC, 0)
    found = {}
    for path, (a_RD, b_OR) in adapter.tensors().items():
        lost_OD = files[f"{path}.weight"].to(backbone.dtype).float() - backbone.linears[path].weight.float()
        theirs = _low_rank_decomposition(lost_OD, SPEC.rank_for(path))
        left_OD = lost_OD - SPEC.scale_for(path) * (b_OR @ a_RD)
        found[path] = tuple(x.norm().item() for x in (lost_OD, left_OD, lost_OD - theirs["L"] @ theirs["R"]))
    return found


@pytest.mark.parametrize(
    ("quantize", "settings"),
    [("nf4", {}), ("int8", {}), ("fp8", {}), ("nf4", {"kernels": "fused"}), ("nf4", {"dtype": "bfloat16"})],
)
def test_start_when_the_backbone_is_quantised_then_comes_as_near_as_its_rank_allows(directory, quantize, settings):
    """PEFT's own decomposition is the best there is; Weft divides it by the scale, which PEFT leaves out."""
    found = errors(directory, quantize, **settings)
    assert len(found) == 14
    for lost, left, best in found.values():
        assert left == pytest.approx(best, rel=1e-3) and left < 0.95 * lost


def test_job_when_trained_beside_others_then_has_its_own_bits_and_is_written_as_a_plain_lora(directory, tmp_path):
    spec = job_spec("me", adapter={"r": 4, "init_lora_weights": "loftq", "lora_dropout": 0.1}, seed=3)
    jobs = [(job_spec("other", adapter={"r": 8}, seed=1), random_data(1)), (spec, random_data(3))]
    ended = []
    for beside in (jobs, jobs[1:]):
        engine = Engine(load_backbone(BackboneSpec(str(directory), quantize="nf4")), capacity=64)
        submit(engine, *beside)
        ended.append(finish(engine)["me"])
    assert_same_bits(*ended)
    engine.export_adapter("me", tmp_path / "a")
    assert "for the base quantised as in training" in (tmp_path / "a" / "README.md").read_text()
    assert read_adapter(tmp_path / "a")[0].init_lora_weights is True


def test_start_when_files_leave_out_the_decoders_name_or_are_several_then_is_the_same(directory, tmp_path):
    expected = load_backbone(BackboneSpec(str(directory), quantize="nf4")).new_adapter(SPEC, 0).tensors()
    tensors = load_file(directory / "model.safetensors")
    for file in directory.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    named = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    halves = [dict(list(named.items())[:9]), dict(list(named.items())[9:])]
    for number, half in enumerate(halves):
        save_file(half, tmp_path / f"model-{number}.safetensors", {"format": "pt"})
    index = {name: f"model-{number}.safetensors" for number, half in enumerate(halves) for name in half}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    found = load_backbone(BackboneSpec(str(tmp_path), quantize="nf4")).new_adapter(SPEC, 0).tensors()
    assert all(x.equal(y) for path in expected for x, y in zip(found[path], expected[path], strict=True))


def test_start_when_the_files_have_changed_then_refused_in_one_sentence(directory, tmp_path):
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    backbone = load_backbone(BackboneSpec(str(tmp_path), quantize="nf4"))
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.self_attn.v_proj.weight"
    tensors[name] = copy.deepcopy(tensors[name]).mul_(2)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"the weight of model\.layers\.1\.self_attn\.v_proj cannot be found in the "):
        backbone.new_adapter(SPEC, 0)


def test_start_when_a_linear_is_stored_as_it_is_then_is_that_of_any_lora(directory):
    backbone = load_backbone(BackboneSpec(str(directory), quantize="nf4"))
    path = next(iter(backbone.linears))
    backbone.linears[path].frozen = Dense.of(backbone.linears[path].weight)
    backbone.linears[path].read_original = None
    a_RD, b_OR = backbone.new_adapter(SPEC, 0).tensors()[path]
    assert a_RD.any() and not b_OR.any()


SENTENCE = "loftq needs quantised weights, whose loss it makes up for; set quantize, or use pissa."


def test_run_when_nothing_is_quantised_then_is_refused_before_anything_is_loaded():
    job = {"name": "a", "train_data": "rows.jsonl", "adapter": {"init_lora_weights": "loftq"}}
    with pytest.raises(ConfigError) as caught:
        run_from_mapping({"base_model": "tiny", "jobs": [job]})
    assert (caught.value.where, caught.value.message) == ("jobs.0.adapter.init_lora_weights", SENTENCE)
    assert isinstance(run_from_mapping({"base_model": "tiny", "quantize": "int8", "jobs": [job]}), RunSpec)


def test_backbone_when_nothing_is_quantised_then_refuses_the_adapter(directory):
    backbone = load_backbone(BackboneSpec(str(directory)))
    for make in (backbone.check_adapter, lambda spec: backbone.new_adapter(spec, 0)):
        with pytest.raises(ConfigError) as caught:
            make(SPEC)
        assert caught.value.message == SENTENCE


@pytest.mark.parametrize(
    ("settings", "where", "sentence"),
    [
        ({"method": "dora"}, "init_lora_weights", "loftq is a start of lora, not of dora."),
        ({"lora_alpha": 0}, "lora_alpha", "loftq needs an alpha above 0."),
        (
            {"loftq_config": {"loftq_bits": 4}},
            "loftq_config",
            "loftq makes up for `quantize` of the run; leave it out.",
        ),
    ],
)
def test_spec_when_loftq_does_not_go_with_it_then_refused_with_the_reason(settings: dict[str, Any], where, sentence):
    with pytest.raises(ConfigError) as caught:
        AdapterSpec(**{"init_lora_weights": "loftq", **settings})
    assert (caught.value.where, caught.value.message) == (where, sentence)


def test_adapter_when_made_then_reads_each_weight_once_in_turn(directory, monkeypatch):
    backbone = load_backbone(BackboneSpec(str(directory), quantize="nf4"))
    read: list[str] = []
    for path, linear in backbone.linears.items():
        own = linear.read_original
        assert own is not None
        monkeypatch.setattr(linear, "read_original", lambda path=path, own=own: (read.append(path), own())[1])
    backbone.new_adapter(SPEC, 0, torch.device("cpu"))
    assert read == list(backbone.linears)
