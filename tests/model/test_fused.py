"""The fused path's slots, weights and refusals; that it computes what the reference path computes is tested for every
family in tests/plan/families."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_models import random_backbone, random_sample

from weft.adapters.adapter import Adapter
from weft.errors import ModelError
from weft.model.backbone import Backbone
from weft.model.fused.inputs import input_shape
from weft.model.fused.path import FusedPath
from weft.model.packed import PackedBatch, SlotSample, pack_samples
from weft.spec import AdapterSpec

SPECS = [AdapterSpec(r=8, lora_alpha=16), AdapterSpec(r=5, lora_dropout=0.2)]
LENGTHS = [(30, 0), (2, 0), (50, 1), (20, None)]
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
    slot_samples = [
        SlotSample(random_sample(rng, n), None if i is None else slots[i], 0.01, 7 + n if drops else None)
        for n, i in lengths
    ]
    return pack_samples(slot_samples, 128, torch.device("cpu"))


def test_fused_step_when_adapters_come_and_go_then_slots_are_used_again():
    backbone = random_backbone("llama", kernels="fused")
    adapters, slots = attached(backbone)
    assert len(set(slots)) == len(slots)
    before = backbone.forward_backward(packed(slots), 128)
    backbone.detach(slots[1])
    again = backbone.attach(adapters[1])
    assert again == slots[1]
    assert backbone.forward_backward(packed(slots), 128) == before


def test_fused_step_when_there_is_room_for_more_rows_and_samples_then_not_a_bit_changes():
    """A microbatch may run on what was captured for a larger one: rows without an owner change no result."""
    ends = []
    for num_rows, num_spans in ((128, 16), (512, 64)):
        backbone = random_backbone("llama", kernels="fused")
        adapters, slots = attached(backbone)
        batch, path = packed(slots), backbone.path
        assert isinstance(path, FusedPath)
        shape = replace(input_shape(batch, with_longest=False), num_rows=num_rows, num_spans=num_spans)
        path.follow(batch.segment_slots)
        buffers = path.new_buffers()
        hidden_TD = buffers.forward(batch, shape, 128, needs_grad=True)
        grad_TD = buffers.zero_gradient()
        used = slice(0, batch.num_tokens)
        grad_TD[used] = hidden_TD[used] * 1e-3
        buffers.backward(grad_TD)
        ends.append([hidden_TD[used], *(g.grad for a in adapters for g in a.groups.values())])
    assert all(one.equal(other) for one, other in zip(*ends, strict=True))
    assert all(tensor.any() for tensor in ends[0])


def test_fused_step_when_more_adapters_than_spare_slots_come_then_all_find_room():
    backbone = random_backbone("llama", kernels="fused")
    slots = [backbone.attach(backbone.new_adapter(AdapterSpec(r=1), seed)) for seed in range(70)]
    assert len(set(slots)) == 70
    assert len(backbone.forward_backward(packed(slots, [(5, 0), (5, 69)]), 128)) == 2


@pytest.mark.parametrize(
    ("name", "reason"),
    [("gemma2", "gemma2"), ("llama_dynamic", "dynamic"), ("llama_relu", "its activation is not silu or gelu_tanh")],
)
def test_fused_kernels_when_the_model_does_not_fit_then_gives_the_reason(name, reason):
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
