"""Adapters of every method on a GPU: the same bits beside any neighbours, and near the reference path."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.steps.regimes import BF16
from weft.adapters.adapter import Adapter
from weft.data.samples import Sample
from weft.model.backbone import Backbone
from weft.model.load import make_backbone
from weft.model.packed import SlotSample, pack_samples
from weft.plan.cost.shape import find_shape
from weft.spec import AdapterSpec

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
SHAPE = replace(find_shape("llama-3.2-1b"), layers=2)
SPECS = {
    "dora": AdapterSpec(method="dora", r=16),
    "vera": AdapterSpec(method="vera", vera_rank=256),
    "ia3": AdapterSpec(method="ia3"),
    "ia3_outputs": AdapterSpec(method="ia3", target_modules="all-linear", feedforward_modules=()),
    "bitfit": AdapterSpec(method="bitfit"),
    "bottleneck": AdapterSpec(method="bottleneck", bottleneck_activation="gelu"),
    "diff_pruning": AdapterSpec(method="diff_pruning"),
    "prompt": AdapterSpec(method="prompt_tuning", num_virtual_tokens=20),
    "prefix": AdapterSpec(method="prefix_tuning", num_virtual_tokens=20),
    "pissa": AdapterSpec(r=16, init_lora_weights="pissa_niter_4"),
}
OWN = [(200, 1), (77, 1), (130, 1)]
"""Tokens of the samples of the adapter that is looked at."""
BESIDE = [(60, 0), (200, 1), (150, 2), (77, 1), (31, 0), (130, 1)]
"""The same among those of a LoRA and of no adapter."""
CAPACITY = 1024


def sample(length: int) -> Sample:
    rng = np.random.default_rng(length)
    return Sample(rng.integers(3, 1000, length, dtype=np.int32), np.arange(length) >= length // 2)


def moved(adapter: Adapter) -> Adapter:
    """With other weights than it starts with."""
    generator = torch.Generator().manual_seed(3)
    noise = {name: torch.randn(x.shape, generator=generator).to(GPU) for name, x in adapter.trained().items()}
    adapter.put({name: x + 0.02 * noise[name] for name, x in adapter.trained().items()})
    return adapter


def gradients(backbone: Backbone, spec: AdapterSpec, lengths: list[tuple[int, int]]) -> list[torch.Tensor]:
    """Of the adapter, group by group."""
    own, other = moved(backbone.new_adapter(spec, 1)), moved(backbone.new_adapter(AdapterSpec(r=64), 2))
    slots: list[int | None] = [backbone.attach(other), backbone.attach(own), None]
    slot_samples = [
        SlotSample(sample(length).led_by(backbone.leading_rows(slots[index])), slots[index], 0.01, 7 + length)
        for length, index in lengths
    ]
    backbone.forward_backward(pack_samples(slot_samples, CAPACITY, GPU), backbone.path.row_tile(CAPACITY))
    own.complete_gradients()
    found = [group.grad.clone() for group in own.groups.values()]
    for slot in slots[:2]:
        assert slot is not None
        backbone.detach(slot)
    return found


@pytest.fixture(scope="module")
def backbones() -> dict[str, Backbone]:
    return {path: make_backbone(SHAPE, BF16, torch.bfloat16, GPU, path) for path in ("fused", "reference")}


@pytest.mark.parametrize("kind", SPECS)
def test_gradients_when_the_method_is_another_then_are_near_the_reference_and_the_same_beside_any(backbones, kind):
    """Alone and among others: the same bits; and what the reference path computes, but for rounding."""
    spec = SPECS[kind]
    assert backbones["fused"].lane(spec) == "", "it has kernels"
    alone, beside = (gradients(backbones["fused"], spec, lengths) for lengths in (OWN, BESIDE))
    assert all(torch.equal(one, other) for one, other in zip(alone, beside, strict=True))
    for found, expected in zip(alone, gradients(backbones["reference"], spec, OWN), strict=True):
        error = float((found - expected).norm() / expected.norm())
        print(f"{kind}: {error:.4f}")
        assert error <= 0.05
