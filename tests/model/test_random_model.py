"""Shapes are those of the published models, and builds of them repeat."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from weft.model.load import build, build_empty
from weft.plan.cost.shape import SHAPES

CPU = torch.device("cpu")
PUBLISHED = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "mistral-7b": 7_248_023_552,
    "gemma-3-4b": 3_880_263_168,
    "phi-3-mini": 3_821_079_552,
    "phi-4-mini": 3_836_021_760,
    "phi-4": 14_659_507_200,
    "tinyllama-1.1b": 1_100_048_384,
}
FAMILIES = ["llama-3.2-1b", "qwen2.5-0.5b", "qwen3-8b", "mistral-7b", "gemma-3-4b", "phi-4-mini"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_shape_when_built_then_has_the_published_number_of_parameters(name):
    model = build_empty(SHAPES[name], torch.bfloat16, "sdpa")
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[name]
    products = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    assert products == SHAPES[name].num_product_weights


@pytest.mark.parametrize(
    "family", ["llama-3.2-1b", "qwen2.5-0.5b", "qwen3-8b", "mistral-7b", "gemma-3-4b", "phi-4-mini"]
)
def test_build_when_done_twice_then_models_are_equal_and_run(family):
    sizes = {"hidden": 32, "ffn": 48, "layers": 2, "heads": 4, "kv_heads": 2, "head_size": 8, "vocabulary": 50}
    shape = replace(SHAPES[family], **sizes)
    first, second = (build(shape, torch.float32, CPU, "sdpa") for _ in range(2))
    ids = torch.arange(12)[None]
    losses = [model(input_ids=ids, labels=ids).loss for model in (first, second)]
    assert torch.equal(*losses)
    assert torch.isfinite(losses[0])
    assert (first.lm_head.weight is first.model.embed_tokens.weight) == shape.tied
    layer = first.model.layers[1]
    x = torch.randn(3, 32)
    expected = x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-5)
    torch.testing.assert_close(layer.input_layernorm(x), expected, msg="norms multiply by one")
    assert not torch.equal(layer.mlp.down_proj.weight, first.model.layers[0].mlp.down_proj.weight)


def test_rotary_table_when_built_then_is_the_one_transformers_computes():
    from transformers import AutoModelForCausalLM

    shape = replace(SHAPES["llama-3.1-8b"], hidden=32, ffn=48, layers=1, heads=4, kv_heads=2, vocabulary=50)
    theirs = AutoModelForCausalLM.from_config(shape.config())
    ours = build(shape, torch.float32, CPU, "sdpa")
    assert torch.equal(ours.model.rotary_emb.inv_freq, theirs.model.rotary_emb.inv_freq)
