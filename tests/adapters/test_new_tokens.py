"""Tokens that a job adds to the backbone's: read, trained, written and kept from everybody else."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from tiny_models import VOCABULARY, Job, assert_same_bits, job_spec, random_data, random_model, train
from tiny_tokenizer import word_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from weft.adapters.parts import INPUT_ROWS, OUTPUT_ROWS
from weft.data.load import load_job_data
from weft.data.prepared.key import tokenizer_identity
from weft.data.samples import Sample
from weft.data.tokenise import new_token_ids, with_new_tokens
from weft.engine.engine import Engine
from weft.engine.inference.attach import attach_adapter, read_named
from weft.engine.inference.generate import Request, generate
from weft.engine.inference.merge import merge_rows
from weft.errors import AdapterFileError, ConfigError, DataError
from weft.model.backbone import Backbone
from weft.model.packed import SlotSample, pack_samples
from weft.objectives.preference import Dpo
from weft.spec import AdapterSpec
from weft.spec.sampling import Decoding

NEW = ("<think>", "<done>")
FAMILIES = ["llama_tied", "llama_bias"]
TOKENS = np.array([5, 61, 8, 62, 61, 30, 9, 62, 7, 61, 3, 4], dtype=np.int32)
"""Old tokens and both new ones."""


def backbone_of(family: str) -> Backbone:
    return Backbone(random_model(family), word_tokenizer(VOCABULARY), family)


def job(name: str, seed: int, high: int = VOCABULARY + 2, **adapter: Any) -> Job:
    spec = job_spec(name, seed=seed, adapter={"r": 4, **adapter}, learning_rate=3e-2)
    return spec, random_data(seed, high=high)


def exported(backbone: Backbone, path: Path) -> Path:
    """A trained adapter with new tokens, as its job leaves it."""
    engine = Engine(backbone, capacity=64)
    engine.submit(*job("me", 3, new_tokens=NEW, trainable_token_indices=[9]))
    list(engine.events())
    engine.export_adapter("me", path)
    return path


def logits(backbone: Backbone, slot: int | None) -> torch.Tensor:
    sample = Sample(TOKENS, np.ones(len(TOKENS), dtype=bool))
    return backbone.logits(pack_samples([SlotSample(sample, slot)], None, backbone.device))


def plain_logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.from_numpy(TOKENS.astype("int64"))[None]).logits[0]
    return found


def test_tokenizer_when_a_job_has_new_tokens_then_is_another_for_that_job_alone(tmp_path):
    """Also for the cache of prepared data, which would hand it what others have read."""
    tokenizer = word_tokenizer(VOCABULARY)
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "w5 w6", "completion": " <think> w7 <done>"}) + "\n")
    spec = replace(job_spec("me"), train_data=("a.jsonl",))
    new = replace(spec, adapter=AdapterSpec(r=4, new_tokens=NEW))
    plain, own = (load_job_data(s, tokenizer, tmp_path).train.samples[0].tokens.tolist() for s in (spec, new))
    assert [61 in plain, 62 in plain] == [False, False]
    assert [own.count(61), own.count(62)] == [1, 1]
    extended = with_new_tokens(tokenizer, NEW)
    assert len(tokenizer) == VOCABULARY and len(extended) == VOCABULARY + 2
    assert extended is with_new_tokens(tokenizer, NEW), "made once"
    assert tokenizer_identity(tokenizer) != tokenizer_identity(extended)
    assert new_token_ids(tokenizer, ("w7", "<a>")) == (7, VOCABULARY), "one that is there keeps its id"


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_when_a_job_begins_then_new_tokens_have_the_mean_of_all(family):
    backbone = backbone_of(family)
    rows = backbone.new_adapter(AdapterSpec(r=4, new_tokens=(*NEW, "w7")), 0).tensors()
    assert (OUTPUT_ROWS in rows) is (family == "llama_bias")
    for name, weight in (
        (INPUT_ROWS, backbone.model.get_input_embeddings().weight),
        (OUTPUT_ROWS, backbone.head.weight_VD),
    ):
        if name in rows:
            (own,) = rows[name]
            torch.testing.assert_close(own[:2], weight.mean(dim=0).expand(2, -1))
            assert own[2].equal(weight[7])


@pytest.mark.parametrize("family", FAMILIES)
def test_job_when_others_have_new_tokens_of_the_same_ids_then_has_the_bits_it_has_alone(family):
    backbone = backbone_of(family)
    jobs = [
        job("me", 3, new_tokens=NEW),
        job("other", 4, new_tokens=("<a>", "<b>"), trainable_token_indices=[5]),
        job("plain", 5, high=VOCABULARY),
    ]
    alone = {one[0].name: train(backbone, [one])[one[0].name] for one in jobs}
    for capacity in (64, 96):
        together = train(backbone, jobs, capacity=capacity)
        for name, outcome in alone.items():
            assert outcome.state == "succeeded"
            assert_same_bits(together[name], outcome)


@pytest.mark.parametrize("family", FAMILIES)
def test_adapter_when_written_then_peft_weft_and_the_merged_model_compute_the_same(family, tmp_path):
    backbone = backbone_of(family)
    path = exported(backbone, tmp_path / "a")
    stored = read_named(str(path))
    assert stored.spec.new_tokens == NEW
    mine = logits(backbone, attach_adapter(backbone, stored))
    assert mine.shape == (len(TOKENS), VOCABULARY + 2)

    plain = random_model(family)
    plain.set_attn_implementation("eager")
    base = copy.deepcopy(plain)
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert tokenizer("w5 <think>")["input_ids"] == [5, 61]
    base.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    theirs = peft.PeftModel.from_pretrained(base, path)
    torch.testing.assert_close(mine, plain_logits(theirs), rtol=1e-4, atol=1e-5)

    extended = merge_rows(stored, plain, word_tokenizer(VOCABULARY))
    assert len(extended) == VOCABULARY + 2 == plain.config.vocab_size
    slot = attach_adapter(backbone, rows_alone(stored))
    torch.testing.assert_close(plain_logits(plain), logits(backbone, slot), rtol=1e-4, atol=1e-5)


def rows_alone(stored: Any) -> Any:
    """The adapter with its rows alone: merging the rest is tested elsewhere."""
    zeroed = {
        p: (t if p in (INPUT_ROWS, OUTPUT_ROWS) else (t[0], torch.zeros_like(t[1]))) for p, t in stored.tensors.items()
    }
    return replace(stored, tensors=zeroed)


def test_generate_when_only_one_adapter_has_new_tokens_then_no_other_writes_them():
    backbone = backbone_of("llama_bias")
    adapter = backbone.new_adapter(AdapterSpec(r=4, new_tokens=NEW), 0)
    adapter.token_rows[OUTPUT_ROWS].rows_KD.mul_(1e4)
    slot = backbone.attach(adapter)
    requests = [Request([5, 61, 7], slot), Request([5, 6, 7], None)]
    mine, bare = generate(backbone, requests, Decoding(max_new_tokens=6))
    assert bare == generate(backbone, requests[1:], Decoding(max_new_tokens=6))[0]
    assert max(mine) >= VOCABULARY > max(bare)
    assert "<" in backbone.tokenizer_of(slot).decode(mine)
    assert backbone.tokenizer_of(None) is backbone.tokenizer


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"new_tokens": ["<a>", "<a>"]}, "new_tokens: '<a>' is there twice"),
        ({"new_tokens": [" "]}, "new_tokens: got ' '; a token needs characters other than white space"),
        (
            {"new_tokens": ["<a>"], "modules_to_save": ["lm_head"]},
            "new_tokens: modules_to_save copies the backb",
        ),
        ({"new_tokens": ["<a>"], "method": "ia3"}, "new_tokens: is a setting of lora and dora"),
    ],
)
def test_settings_when_they_are_impossible_then_refused_in_one_sentence(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        AdapterSpec(**settings)


def test_adapter_when_the_tokenizer_has_more_tokens_than_the_backbone_rows_then_new_ones_are_refused():
    backbone = Backbone(random_model("llama"), with_new_tokens(word_tokenizer(VOCABULARY), NEW), "llama")
    with pytest.raises(ConfigError, match="the tokenizer has 63 tokens and the backbone rows of 61"):
        backbone.check_adapter(AdapterSpec(r=4, new_tokens=("<a>",)))


class SlowTokenizer(PreTrainedTokenizerFast):
    """A tokenizer that cannot be written as one file."""

    is_fast = False


def test_adapter_when_the_tokenizer_cannot_be_written_whole_then_new_tokens_are_refused():
    tokenizer = SlowTokenizer(tokenizer_object=word_tokenizer(VOCABULARY).backend_tokenizer)
    with pytest.raises(ConfigError, match=r"the backbone's tokenizer has no tokenizer.json"):
        Backbone(random_model("llama"), tokenizer, "llama").check_adapter(AdapterSpec(r=4, new_tokens=NEW))


def test_job_when_the_bare_backbone_reads_new_tokens_too_then_is_refused():
    engine = Engine(backbone_of("llama"), capacity=64)
    spec, data = job("me", 3, new_tokens=NEW)
    pairs = replace(data, train=replace(data.train, objective=Dpo(0.4)))
    with pytest.raises(DataError, match="a token outside 0 to 60, which is all the backbone knows"):
        engine.submit(spec, pairs)
    with pytest.raises(DataError, match="a token outside 0 to 60"):
        engine.submit(*job("plain", 3))


def test_job_when_it_is_compared_with_an_adapter_that_has_its_new_tokens_then_learns(tmp_path):
    backbone = backbone_of("llama_tied")
    path = exported(backbone, tmp_path / "a")
    spec, data = job("me", 3, new_tokens=NEW)
    pairs = replace(data, train=replace(data.train, objective=Dpo(0.4)))
    mine = replace(spec, reference=str(path)), pairs
    alone = train(backbone, [mine])["me"]
    assert alone.state == "succeeded" and alone.losses[-1] < alone.losses[0]
    assert_same_bits(train(backbone, [mine, job("other", 4, new_tokens=("<a>", "<b>"))])["me"], alone)


def test_job_when_it_goes_on_from_new_tokens_then_has_to_name_them(tmp_path):
    backbone = backbone_of("llama_tied")
    path = exported(backbone, tmp_path / "a")
    engine = Engine(backbone, capacity=64)
    spec, data = job("me", 3, new_tokens=NEW, trainable_token_indices=[9])
    engine.submit(replace(spec, init_adapter=str(path)), data)
    assert engine.adapter_of("me")[INPUT_ROWS][0].equal(read_named(str(path)).tensors[INPUT_ROWS][0])
    with pytest.raises(ConfigError, match=r'has new tokens; write adapter: {new_tokens: \["<think>", "<done>"\], …}'):
        engine.submit(replace(spec, name="b", adapter=AdapterSpec(), init_adapter=str(path)), data)


def test_adapter_when_its_tokenizer_is_gone_or_broken_then_refused_in_one_sentence(tmp_path):
    backbone = backbone_of("llama_tied")
    path = exported(backbone, tmp_path / "a")
    (path / "tokenizer.json").write_text('{"added_tokens": 3}')
    with pytest.raises(AdapterFileError, match="is no tokenizer that transformers wrote"):
        read_named(str(path))
    (path / "tokenizer.json").unlink()
    with pytest.raises(AdapterFileError, match=r"got token 61; model.embed_tokens of the backbone has rows 0 to 60"):
        attach_adapter(backbone, read_named(str(path)))
