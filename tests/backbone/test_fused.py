"""The fused step computes what the reference path computes, for every family it takes and however it saves memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import random_backbone, random_sample

from weft.adapters.adapter import Adapter
from weft.backbone.backbone import Backbone
from weft.backbone.fused.memory import Memory
from weft.backbone.fused.path import FusedPath
from weft.backbone.packed import PackedBatch, Placed, pack_samples
from weft.errors import ModelError
from weft.objectives.metrics import ACCURACY, LOSS, Score
from weft.spec import AdapterSpec

FAMILIES = ["llama", "llama_bias", "llama_tied", "llama_odd", "llama_llama3", "llama_yarn", "llama_linear"]
FAMILIES += ["mistral", "qwen2", "qwen2_sliding", "qwen3"]
SPECS = [
    AdapterSpec(r=8, lora_alpha=16),
    AdapterSpec(r=5, lora_alpha=7, lora_dropout=0.2, target_modules=("q_proj", "v_proj", "down_proj")),
    AdapterSpec(r=3, lora_dropout=0.5, use_rslora=True, rank_pattern={"up_proj": 20, "down_proj": 17}),
    AdapterSpec(r=8, target_modules=("k_proj", "up_proj", "o_proj"), rank_pattern={"o_proj": 2}),
]
LENGTHS = [(30, 0), (2, 0), (50, 1), (20, None), (40, 2), (17, 3), (9, 3)]
"""Tokens of a sample and the adapter it trains."""


def attached(backbone: Backbone) -> tuple[list[Adapter], list[int]]:
    adapters = [backbone.new_adapter(spec, seed) for seed, spec in enumerate(SPECS)]
    for seed, adapter in enumerate(adapters):
        generator = torch.Generator().manual_seed(seed)
        adapter.groups["b"].params.copy_(torch.randn(adapter.groups["b"].params.shape, generator=generator) * 0.1)
        adapter.changed()
    return adapters, [backbone.attach(adapter) for adapter in adapters]


def packed(slots: list[int], lengths: list[tuple[int, int | None]] = LENGTHS, *, drops: bool = True) -> PackedBatch:
    rng = np.random.default_rng(5)
    placed = [
        Placed(random_sample(rng, n), None if i is None else slots[i], 0.01, 7 + n if drops else None)
        for n, i in lengths
    ]
    return pack_samples(placed, 128, torch.device("cpu"))


def run(backbone: Backbone) -> tuple[list[Score], list[Score], list[torch.Tensor]]:
    """Scores with and without dropout, and all gradients."""
    adapters, slots = attached(backbone)
    scores = backbone.launch(packed(slots), 128).scores()
    plain = backbone.scores(packed(slots, drops=False), 128)
    return (
        scores,
        plain,
        [grad for adapter in adapters for grad in (adapter.groups["a"].grad, adapter.groups["b"].grad)],
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_fused_step_when_jobs_are_mixed_then_equals_the_reference(name):
    expected, mine = (run(random_backbone(name, kernels=kernels)) for kernels in ("reference", "fused"))
    for ours, theirs in zip(mine[:2], expected[:2], strict=True):
        assert [s[LOSS].total for s in ours] == pytest.approx([s[LOSS].total for s in theirs], rel=1e-5)
        assert [s[ACCURACY] for s in ours] == [s[ACCURACY] for s in theirs]
    assert expected[0] != expected[1], "dropout changed nothing"
    for one, other in zip(mine[2], expected[2], strict=True):
        assert other.norm() > 0
        assert (one - other).norm() <= 1e-5 * other.norm()


@pytest.mark.parametrize("memory", [Memory("mlp"), Memory("full"), Memory("none", True), Memory("full", True)])
@pytest.mark.parametrize("name", ["llama_bias", "qwen3"])
def test_fused_step_when_it_saves_memory_then_same_bits(name, memory):
    expected = run(random_backbone(name, kernels="fused"))
    mine = run(random_backbone(name, kernels="fused", memory=memory))
    assert mine[:2] == expected[:2]
    assert all(torch.equal(one, other) for one, other in zip(mine[2], expected[2], strict=True))


def test_fused_step_when_a_neighbour_is_nan_then_nobody_else_notices():
    """A NaN in one adapter's B reaches its own rows and gradients only."""
    backbone = random_backbone("llama", kernels="fused")
    adapters, slots = attached(backbone)
    clean_losses = backbone.forward_backward(packed(slots), 128)
    clean = [adapter.groups["b"].grad.clone() for adapter in adapters]
    for adapter in adapters:
        adapter.zero_grad()
    adapters[1].groups["b"].params[7] = float("nan")
    adapters[1].changed()
    losses = backbone.forward_backward(packed(slots), 128)
    for i, (adapter, before) in enumerate(zip(adapters, clean, strict=True)):
        assert torch.equal(adapter.groups["b"].grad, before) == (i != 1)
    for (_, owner), now, before in zip(LENGTHS, losses, clean_losses, strict=True):
        assert (now == before) == (owner != 1)


def test_fused_step_when_adapters_come_and_go_then_slots_are_used_again():
    backbone = random_backbone("llama", kernels="fused")
    adapters, slots = attached(backbone)
    assert len(set(slots)) == len(slots)
    before = backbone.forward_backward(packed(slots), 128)
    backbone.detach(slots[1])
    again = backbone.attach(adapters[1])
    assert again == slots[1]
    assert backbone.forward_backward(packed(slots), 128) == before


def test_fused_step_when_more_adapters_than_spare_slots_come_then_all_find_room():
    backbone = random_backbone("llama", kernels="fused")
    slots = [backbone.attach(backbone.new_adapter(AdapterSpec(r=1), seed)) for seed in range(70)]
    assert len(set(slots)) == 70
    assert len(backbone.forward_backward(packed(slots, [(5, 0), (5, 69)]), 128)) == 2


@pytest.mark.parametrize(("name", "reason"), [("gemma2", "gemma2"), ("llama_dynamic", "dynamic"), ("phi3", "phi3")])
def test_fused_kernels_when_the_model_does_not_fit_then_says_why(name, reason):
    with pytest.raises(ModelError, match=reason):
        random_backbone(name, kernels="fused")
    assert reason in random_backbone(name, kernels="auto").kernels


def test_kernels_when_auto_on_a_cpu_then_reference():
    backbone = random_backbone("llama", kernels="auto")
    assert backbone.path.name == "reference"
    assert backbone.kernels.startswith("reference: ")


def test_fused_kernels_when_chosen_then_the_model_holds_no_weight_twice():
    """The model's own linears are parts of the joined weights."""
    backbone = random_backbone("llama", kernels="fused")
    joined = {p.data_ptr() for p in backbone.linears["model.layers.0.self_attn.q_proj"].frozen.parameters()}
    assert isinstance(backbone.path, FusedPath)
    layer = backbone.path._model.layers[0]
    assert {p.data_ptr() for p in layer.qkv.weight.parameters()} == joined
