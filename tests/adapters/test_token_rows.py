"""Rows of the embedding and the output head that adapters have of their own: bits, files, merging, what is refused."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import (
    Job,
    assert_same_bits,
    flat,
    job_spec,
    random_backbone,
    random_data,
    random_model,
    train,
)

from weft.adapters.adapter import Adapter
from weft.adapters.parts import INPUT_ROWS, OUTPUT_ROWS
from weft.adapters.targets import leaf_names
from weft.engine.engine import Engine
from weft.engine.inference.attach import attach_adapter, read_named
from weft.engine.inference.merge import merge_rows
from weft.errors import AdapterFileError, ConfigError
from weft.model.backbone import Backbone
from weft.model.packed import SlotSample, pack_samples
from weft.objectives.preference import Dpo
from weft.spec import AdapterSpec
from weft.store.peft_files import CONFIG_FILE, TENSORS_FILE, read_adapter, write_adapter

SOME: dict[str, Any] = {"trainable_token_indices": (30, 9, 4, 5)}
BOTH: dict[str, Any] = {"trainable_token_indices": {"embed_tokens": (9, 4), "lm_head": (4, 7, 8)}}
WHOLE: dict[str, Any] = {"modules_to_save": ("embed_tokens", "lm_head")}
ONE: dict[str, Any] = {"modules_to_save": ("lm_head",)}
CASES = [
    ("llama_tied", SOME),
    ("llama_tied", WHOLE),
    ("llama_tied", ONE),
    ("llama_bias", SOME),
    ("llama_bias", BOTH),
    ("llama_bias", WHOLE),
    ("gemma2", SOME),
]


def changed_adapter(backbone: Backbone, rows: dict[str, Any]) -> Adapter:
    """An adapter whose weights are not those it starts with."""
    adapter = backbone.new_adapter(AdapterSpec(r=4, target_modules=("q_proj", "v_proj"), **rows), 3)
    generator = torch.Generator().manual_seed(5)
    adapter.put({name: x + 0.2 * torch.randn(x.shape, generator=generator) for name, x in adapter.flat().items()})
    return adapter


def written(backbone: Backbone, adapter: Adapter, path: Path) -> Path:
    names = leaf_names(adapter.modules, backbone.sites.shapes_for(adapter.method))
    assert names is not None
    rows = backbone.embeddings
    write_adapter(
        path, rows.named(adapter.spec), adapter.tensors(), base_model="tiny", target_names=names, row_modules=rows.paths
    )
    return path


def logits(backbone: Backbone, slot: int | None) -> torch.Tensor:
    sample = random_data(1, num_samples=1, lengths=(20, 21)).train.samples[0]
    return backbone.logits(pack_samples([SlotSample(sample, slot)], None, backbone.device))


def plain_logits(model: Any) -> torch.Tensor:
    sample = random_data(1, num_samples=1, lengths=(20, 21)).train.samples[0]
    with torch.no_grad():
        found: torch.Tensor = model(torch.from_numpy(sample.tokens.astype("int64"))[None]).logits[0]
    return found


def pair_job(name: str, seed: int, **rows: Any) -> Job:
    """A job that learns from pairs, and whose head has rows of its own where it is compared and where it learns."""
    data = random_data(seed, num_samples=16)
    spec = job_spec(name, seed=seed, adapter={"r": 4, **rows}, global_batch_size=3, learning_rate=3e-2)
    return spec, replace(data, train=replace(data.train, objective=Dpo(0.4)))


def test_job_when_rows_are_tied_then_has_the_bits_it_has_alone_beside_others_and_however_cut():
    """Of the same tokens others have other rows; a pair reads the bare backbone's rows too."""
    backbone = random_backbone("llama_tied")
    mine = job_spec("me", adapter={"r": 4, **SOME}, learning_rate=3e-2), random_data(3)
    others = [
        (job_spec("other", seed=2, adapter={"r": 4, "trainable_token_indices": (4, 5, 6)}), random_data(4)),
        (job_spec("lora", seed=5), random_data(5)),
    ]
    pairs = pair_job("pairs", 6, **SOME)
    alone = {job[0].name: train(backbone, [job])[job[0].name] for job in (mine, *others, pairs)}
    together = train(backbone, [mine, *others, pairs])
    cut = train(backbone, [mine, *others, pairs], capacity=96)
    for name, outcome in alone.items():
        assert_same_bits(together[name], outcome)
        assert_same_bits(cut[name], outcome)


def test_backbone_when_jobs_had_rows_then_keeps_its_own():
    backbone, plain = random_backbone("llama_tied"), random_model("llama_tied")
    before = logits(backbone, None)
    train(backbone, [(job_spec("me", adapter={"r": 4, **SOME}), random_data(3))])
    assert backbone.embeddings.is_tied
    assert backbone.head.weight_VD.equal(plain.get_input_embeddings().weight)
    assert logits(backbone, None).equal(before)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize(("family", "rows"), CASES)
def test_files_when_peft_loads_them_then_it_computes_the_same(family, rows, tmp_path):
    backbone, plain = random_backbone(family), random_model(family)
    plain.set_attn_implementation("eager")
    path = written(backbone, changed_adapter(backbone, rows), tmp_path / "a")
    slot = attach_adapter(backbone, read_named(str(path)))
    theirs = plain_logits(peft.PeftModel.from_pretrained(copy.deepcopy(plain), path))
    torch.testing.assert_close(logits(backbone, slot), theirs, rtol=1e-4, atol=1e-5)
    assert (logits(backbone, slot) - logits(backbone, None)).abs().max() > 1e-2, "the adapter does nothing"


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize(("family", "rows"), CASES)
def test_files_when_peft_wrote_them_then_weft_computes_the_same(family, rows, tmp_path):
    plain = random_model(family)
    plain.set_attn_implementation("eager")
    given = json.loads(json.dumps(rows))
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], **given)
    model = peft.get_peft_model(plain, config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(tmp_path / "theirs")
    backbone = random_backbone(family)
    slot = attach_adapter(backbone, read_named(str(tmp_path / "theirs")))
    torch.testing.assert_close(logits(backbone, slot), plain_logits(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("family", "rows"), CASES)
def test_merge_when_done_and_saved_then_the_plain_model_computes_what_the_slot_does(family, rows, tmp_path):
    """Also where a tied model is tied no more."""
    backbone, plain = random_backbone(family), random_model(family)
    plain.set_attn_implementation("eager")
    adapter = changed_adapter(backbone, rows)
    stored = read_named(str(written(backbone, adapter, tmp_path / "a")))
    with torch.no_grad():
        for path, tensors in stored.tensors.items():
            if path not in (INPUT_ROWS, OUTPUT_ROWS):
                adapter.method.merge(adapter.spec, path, tensors, plain.get_submodule(path))
    merge_rows(stored, plain, None)
    plain.save_pretrained(tmp_path / "merged")
    again = type(plain).from_pretrained(tmp_path / "merged", attn_implementation="eager")
    torch.testing.assert_close(plain_logits(again), logits(backbone, backbone.attach(adapter)), rtol=1e-4, atol=1e-5)


def test_job_when_it_goes_on_from_an_adapter_then_has_its_rows(tmp_path):
    backbone = random_backbone("llama_tied")
    path = written(backbone, changed_adapter(backbone, SOME), tmp_path / "a")
    engine = Engine(backbone, capacity=64)
    engine.submit(replace(job_spec("me"), adapter=AdapterSpec(), init_adapter=str(path)), random_data(3))
    _, tensors, _ = read_adapter(path)
    mine = engine.adapter_of("me")
    assert mine.keys() == tensors.keys()
    assert all(x.equal(y) for name in mine for x, y in zip(mine[name], tensors[name], strict=True))
    other = AdapterSpec(r=4, target_modules=("q_proj", "v_proj"), trainable_token_indices=(9, 30, 4, 5))
    with pytest.raises(ConfigError, match="has other rows of tokens; trainable_token_indices, new_tokens"):
        engine.submit(replace(job_spec("b"), adapter=other, init_adapter=str(path)), random_data(3))


@pytest.mark.parametrize(
    ("family", "rows", "sentence"),
    [
        ("llama_tied", {"trainable_token_indices": (3, 61)}, "got token 61; model.embed_tokens of the backbone has"),
        (
            "llama_tied",
            {"trainable_token_indices": {"lm_head": (3,)}},
            "the output head is tied to the input embedding",
        ),
        ("gptj", {"modules_to_save": ("lm_head",)}, "lm_head of the backbone has a bias, which"),
    ],
)
def test_adapter_when_the_backbone_has_no_such_rows_then_is_refused(family, rows, sentence):
    with pytest.raises(ConfigError, match=sentence):
        random_backbone(family).check_adapter(AdapterSpec(r=4, **rows))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"trainable_token_indices": [1, 2]}, r"rows of the input embedding are \(4, 32\); expected \(2, width\)"),
        ({"trainable_token_indices": None}, "holds rows of the input embedding, which the config does not name"),
        ({"trainable_token_indices": {"embed_tokens": [30, 9, 4, 5], "lm_head": [1]}}, "rows of the output head are m"),
        ({"trainable_token_indices": [1, 1, 2, 3]}, "token 1 is there twice"),
        ({"modules_to_save": ["norm"]}, "got 'norm'; accepted are embed_tokens"),
        (None, "rows of the input embedding hold a NaN"),
    ],
)
def test_files_when_rows_are_not_those_of_the_config_then_refused_in_one_sentence(change, sentence, tmp_path):
    backbone = random_backbone("llama_bias")
    path = written(backbone, changed_adapter(backbone, SOME), tmp_path / "a")
    if change is None:
        tensors = load_file(path / TENSORS_FILE)
        next(x for name, x in tensors.items() if "trainable_tokens" in name)[0, 0] = torch.nan
        save_file(tensors, path / TENSORS_FILE)
    else:
        config = json.loads((path / CONFIG_FILE).read_text())
        (path / CONFIG_FILE).write_text(json.dumps({**config, **change}))
    with pytest.raises(AdapterFileError, match=sentence):
        read_adapter(path)


def test_memory_when_a_job_trains_whole_modules_then_their_numbers_are_counted():
    backbone = random_backbone("llama_bias")
    plain, whole = (backbone.new_adapter(AdapterSpec(r=4, **rows), 0) for rows in ({}, WHOLE))
    num = 2 * backbone.head.weight_VD.numel()
    assert whole.num_parameters - plain.num_parameters == num
    held = [backbone.activation_bytes(8, [adapter.spec]) for adapter in (whole, plain)]
    assert held[0] - held[1] >= num * (4 + 4), "a copy as the activations are, and a sum of gradients"
    assert len(flat(whole.tensors())) == len(flat(plain.tensors())) + 2
