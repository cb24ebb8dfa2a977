"""LoRA by the fused path's kernels at the linears of models that it does not know, against slots one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import random_backbone, random_sample

from weft.model.packed import SlotSample, pack_samples
from weft.spec import AdapterSpec

SAMPLES = [(9, 1), (40, 0), (25, None), (17, 2), (12, 0), (20, 1)]
"""Lengths of samples, and the adapters that own them."""


def gradients(name: str, *, by_kernels: bool) -> tuple[list[float], list[torch.Tensor], list[int]]:
    """Losses, gradients and slots: one adapter with dropout, one with experts where there are any, one of DoRA."""
    backbone = random_backbone(name)
    if by_kernels:
        backbone.reference.use_lora_kernels()
    experts = "full" if backbone.sites.experts else "none"
    specs = [
        AdapterSpec(r=3, lora_dropout=0.3, init_lora_weights=False),
        AdapterSpec(r=2, experts=experts, init_lora_weights=False),
        AdapterSpec(r=2, use_dora=True, init_lora_weights=False),
    ]
    adapters = [backbone.new_adapter(spec, seed) for seed, spec in enumerate(specs)]
    slots = [backbone.attach(adapter) for adapter in adapters]
    rng = np.random.default_rng(3)
    slot_samples = [
        SlotSample(random_sample(rng, length), None if own is None else slots[own], 0.1, dropout_key=length)
        for length, own in SAMPLES
    ]
    losses = backbone.forward_backward(pack_samples(slot_samples, 128, backbone.device), 128)
    grads = [group.grad.clone() for adapter in adapters for group in adapter.groups.values()]
    for slot in slots:
        backbone.detach(slot)
    return losses, grads, slots


@pytest.mark.parametrize("name", ["lfm2", "qwen3_moe", "granitemoehybrid_mamba"])
def test_kernels_when_lora_shares_a_microbatch_then_losses_and_gradients_are_those_of_slots(name):
    losses, grads, slots = gradients(name, by_kernels=True)
    plain_losses, plain_grads, _ = gradients(name, by_kernels=False)
    assert [slot > 0 for slot in slots] == [True, True, False], "kernels run LoRA, and not DoRA"
    assert losses == pytest.approx(plain_losses, rel=1e-5)
    for found, expected in zip(grads, plain_grads, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
