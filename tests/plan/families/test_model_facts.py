"""The table of families is that of the registry, and a model's parts are named by its configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from tiny_families import FAMILIES as TINY

from weft.plan.cost.shape import ModelShape, find_shape
from weft.plan.families import FAMILIES, OBSTACLES, REFERENCE_FAMILIES
from weft.plan.model_facts import TITLES, rooms, size_in_words, stored_as, table

ROOT = Path(__file__).parents[3]


def test_table_when_read_in_the_readme_then_is_the_registrys():
    assert table() in (ROOT / "README.md").read_text("utf-8")
    assert TITLES.keys() == {*FAMILIES, *REFERENCE_FAMILIES, *OBSTACLES}


DENSE_FIRST = "4 experts of 24, 2 for each token and a shared one; 1 layer dense, 48 wide"


def rooms_of(name: str) -> dict[str, str]:
    kind, settings = TINY[name]
    return rooms(getattr(transformers, f"{kind}Config")(**settings).to_dict())


@pytest.mark.parametrize("name", TINY)
def test_rooms_when_named_then_every_family_has_each(name):
    found = rooms_of(name)
    assert all(found.values()) and not any("None" in text for text in found.values())
    assert "tested against PEFT" in found["checked"]


def test_rooms_when_a_model_is_unusual_then_report_it():
    oss = rooms_of("gpt_oss")
    assert oss["layers"] == "1 x attention over 4 tokens, 1 x full attention"
    assert oss["attention"] == "4 heads of 8, 2 for keys and values, sinks"
    assert oss["feed-forward"] == "4 experts of 48, 2 for each token"
    assert oss["fast path"] == "no: the fast path has no kernels for routed experts"
    assert rooms_of("lfm2")["fast path"] == "no: the fast path has no kernels for layers with a state"
    assert rooms_of("cohere")["fast path"].startswith("no: cohere is not among llama")
    gemma = rooms_of("gemma4_e2b")["attention"]
    assert "in some layers of 16, the last 2 layers reuse keys and values, embeddings of 16 for each layer" in gemma
    assert "MLA" in rooms_of("glm4_moe_lite")["attention"]
    shared = "4 experts of 24, 2 for each token and a shared one"
    assert rooms_of("glm4_moe")["feed-forward"] == rooms_of("glm4_moe_lite")["feed-forward"] == DENSE_FIRST
    assert rooms_of("nemotron_h")["feed-forward"] == shared
    assert rooms_of("lfm2_moe")["feed-forward"] == "4 experts of 24, 2 for each token; 1 layer dense, 48 wide"
    assert rooms_of("gemma4_moe")["feed-forward"] == "4 experts of 24, 2 for each token, beside a dense block of 48"
    lfm2 = transformers.Lfm2Config(intermediate_size=12288, block_auto_adjust_ff_dim=True).to_dict()
    assert rooms(lfm2)["feed-forward"] == "dense, 8,192 wide"
    assert rooms_of("qwen3_moe")["layouts"] == "spread:N, stages:N, shards:N"
    assert rooms_of("gemma4_e2b")["layouts"] == rooms_of("falcon_h1")["layouts"] == "spread:N"
    granite = rooms_of("granitemoehybrid_mamba")
    assert granite["layers"].endswith("Mamba-2, 1 x full attention")
    assert granite["feed-forward"].endswith("2 for each token and a shared one")
    assert rooms_of("qwen3_5_text")["layers"].startswith("1 x gated delta net")
    assert rooms_of("olmo3")["fast path"] == "yes"
    assert rooms({"model_type": "bloom"})["checked"].startswith("refused: bloom adds scores")


def test_size_when_a_token_uses_few_experts_then_both_numbers_are_reported():
    moe = ModelShape.from_config(transformers.Qwen3_5MoeTextConfig().to_dict())
    assert size_in_words(moe) == "34.7 B parameters, 2.9 B for a token"
    assert size_in_words(ModelShape.from_config(find_shape("llama-3.1-8b").config().to_dict())) == "8.0 B parameters"


def test_storage_when_a_model_has_another_form_then_named():
    assert stored_as({"quantization_config": {"quant_method": "mxfp4"}}) == "mxfp4, read into the backbone's type"
    assert stored_as({"dtype": "bfloat16"}) == "bfloat16"
