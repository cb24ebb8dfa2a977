"""Packed samples get, on every family, the logits and gradients that transformers gives each of them alone."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from covering import each_value
from tiny_models import FAMILIES, POSITIONS, VOCABULARY, attending_eagerly, random_backbone, random_model, random_sample
from torch import nn

from weft.adapters.adapter import Adapter
from weft.data.samples import Sample
from weft.errors import ConfigError, ModelError
from weft.model.backbone import Backbone
from weft.model.packed import SlotSample, pack_samples
from weft.model.packing.selfcheck import check_packing, packing_error
from weft.spec import AdapterSpec

LENGTHS = (5, 1, 17, 2, 9)
"""Below and above the sliding windows of 4."""


def samples(seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> list[Sample]:
    rng = np.random.default_rng(seed)
    return [random_sample(rng, length) for length in lengths]


def ids_of(sample: Sample) -> torch.Tensor:
    return torch.from_numpy(sample.tokens.astype(np.int64))[None]


def plain_logits(name: str, drawn: list[Sample], **options: Any) -> list[torch.Tensor]:
    """What an untouched model of the family answers to each, in its own eager attention."""
    with attending_eagerly(random_model(name, **options)) as model, torch.no_grad():
        return [model(input_ids=ids_of(sample)).logits[0].float() for sample in drawn]


@pytest.mark.parametrize(("name", "tile"), each_value(list(FAMILIES), [None, 128]))
def test_logits_when_packed_then_those_of_transformers_alone(name, tile):
    backbone = random_backbone(name)
    mine = backbone.logits(pack_samples([SlotSample(s) for s in samples()], tile, backbone.device))
    for found, expected in zip(mine[: sum(LENGTHS)].split(LENGTHS), plain_logits(name, samples()), strict=True):
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", ["llama", "gemma2", "phi3", "opt", "gpt_neox"])
def test_logits_when_bfloat16_then_close_to_those_of_transformers(name):
    backbone = random_backbone(name, dtype=torch.bfloat16)
    mine = backbone.logits(pack_samples([SlotSample(s) for s in samples()], None, backbone.device))
    expected = torch.cat(plain_logits(name, samples(), dtype=torch.bfloat16))
    assert (mine - expected).abs().max() <= 3e-2 * expected.abs().max()


class PlainLora(nn.Module):
    """LoRA as in the paper: a reference that autograd differentiates."""

    def __init__(self, linear: nn.Linear, a_RD: torch.Tensor, b_OR: torch.Tensor, scale: float) -> None:
        super().__init__()
        self.linear = linear
        self.a_RD = nn.Parameter(a_RD.clone())
        self.b_OR = nn.Parameter(b_OR.clone())
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.scale * (x @ self.a_RD.t() @ self.b_OR.t())


def plain_gradients(name: str, adapter: Adapter, mine: list[tuple[Sample, float]]) -> tuple[dict, list[float]]:
    """Gradients of A and B, and the summed loss of every sample, by autograd through the plain model."""
    model = copy.deepcopy(random_model(name)).requires_grad_(False)
    modules = {}
    for path, weights in adapter.modules.items():
        parent, _, leaf = path.rpartition(".")
        modules[path] = PlainLora(model.get_submodule(path), weights.a_RD, weights.b_OR, weights.scale)
        setattr(model.get_submodule(parent), leaf, modules[path])
    losses = []
    with attending_eagerly(model):
        for sample, weight in mine:
            targets = ids_of(sample)[0]
            logits = model(input_ids=ids_of(sample)).logits[0, :-1]
            rows = torch.from_numpy(sample.supervised.copy())[1:]
            loss = F.cross_entropy(logits[rows], targets[1:][rows], reduction="sum")
            (loss * weight).backward()
            losses.append(loss.item())
    return {path: (module.a_RD.grad, module.b_OR.grad) for path, module in modules.items()}, losses


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_when_two_adapters_are_packed_then_each_has_those_of_autograd_alone(name):
    backbone = random_backbone(name)
    adapters = [backbone.new_adapter(AdapterSpec(r=r, init_lora_weights=False), seed=r) for r in (2, 3)]
    slots = [backbone.attach(adapter) for adapter in adapters]
    drawn = samples(1, (5, 8, 17, 2, 9))
    owners = (0, 1, 1, 0, 1)
    weights = (0.5, 0.1, 0.2, 1.5, 0.7)
    slot_samples = [SlotSample(s, slots[o], w) for s, o, w in zip(drawn, owners, weights, strict=True)]
    losses = backbone.forward_backward(pack_samples(slot_samples, 64, backbone.device), 64)
    for which, adapter in enumerate(adapters):
        own = [i for i, owner in enumerate(owners) if owner == which]
        expected, summed = plain_gradients(name, adapter, [(drawn[i], weights[i]) for i in own])
        assert [losses[i] for i in own] == pytest.approx(summed, rel=1e-5)
        for path, module in adapter.modules.items():
            for mine, other in zip((module.grad_a_RD, module.grad_b_OR), expected[path], strict=True):
                assert (mine - other).abs().max() <= 2e-5 * max(other.abs().max(), 1e-3), path


@pytest.mark.parametrize("name", FAMILIES)
def test_backbone_when_made_then_every_linear_but_the_head_can_be_adapted(name):
    plain = random_model(name)
    kinds = ("Linear", "FalconLinear", "Conv1D")
    linears = [path for path, module in plain.named_modules() if type(module).__name__ in kinds]
    backbone = random_backbone(name)
    assert list(backbone.linears) == [path for path in linears if path not in ("lm_head", "embed_out")]
    assert not any(p.requires_grad for p in backbone.model.parameters())


@pytest.mark.parametrize("name", FAMILIES)
def test_check_when_the_family_packs_well_then_passes(name):
    backbone = random_backbone(name)
    check_packing(backbone)
    assert packing_error(backbone) <= 1e-5


def test_check_when_attention_looks_over_the_border_then_refuses():
    """Alibi is added to the scores by the model itself, which packed attention never sees."""
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    model = BloomForCausalLM(BloomConfig(vocab_size=VOCABULARY, hidden_size=16, n_layer=1, n_head=2)).eval()
    model.set_attn_implementation("weft_packed")
    with pytest.raises(ModelError, match="bloom lets a sample see the one before it when they are packed"):
        check_packing(Backbone(model, None, "bloom"))


@pytest.mark.parametrize(
    ("name", "limit"), [("llama", POSITIONS), ("llama_yarn", POSITIONS), ("llama_dynamic", 32), ("phi3_longrope", 32)]
)
def test_max_positions_when_read_then_no_neighbour_that_long_changes_my_logits(name, limit):
    backbone = random_backbone(name)
    assert backbone.max_positions == limit
    mine = samples(2, (7,))[0]

    def beside(length: int) -> torch.Tensor:
        other = samples(3, (length,))[0]
        return backbone.logits(pack_samples([SlotSample(mine), SlotSample(other)], 128, backbone.device))[:7]

    assert torch.equal(beside(3), beside(limit))


def test_max_positions_when_rope_is_set_per_kind_of_layer_then_the_shortest_counts():
    """Gemma 3 has one set of rope settings for its sliding layers and one for the others."""
    long = {**FAMILIES["phi3_longrope"][1]["rope_parameters"], "factor": 4.0}
    rope = {"full_attention": long, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    assert random_backbone("gemma3_text", rope_parameters=rope).max_positions == 32


def test_segment_when_a_neighbour_is_nan_then_every_bit_stays():
    backbone = random_backbone("mistral")
    first, mine, last = samples(4, (6, 9, 5))
    with torch.no_grad():
        backbone.model.get_input_embeddings().weight[2] = float("nan")

    def losses(*others: Sample) -> float:
        slot_samples = [SlotSample(others[0]), SlotSample(mine), SlotSample(others[1])]
        return backbone.scores(pack_samples(slot_samples, 128, backbone.device), 128)[1]["loss"].total

    spoiled = [dataclasses.replace(s, tokens=np.full(s.length, 2)) for s in (first, last)]
    assert losses(*spoiled) == losses(first, last)
    assert np.isfinite(losses(*spoiled))


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"r": 2, "new_tokens": ("<hm>",)}, "new_tokens"),
        ({"method": "prompt_tuning", "num_virtual_tokens": 2}, "prompt"),
    ],
)
def test_embeddings_of_every_layer_when_rows_are_no_tokens_then_refused(settings, what):
    """Gemma 4's layers add numbers by token, which such rows do not have."""
    with pytest.raises(ConfigError, match=f"every layer of gemma4_text has embeddings .* {what}.* is not supported"):
        random_backbone("gemma4_e2b").new_adapter(AdapterSpec(**settings), 0)
