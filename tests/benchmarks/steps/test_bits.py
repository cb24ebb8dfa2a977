"""The comparison bit by bit: silent where neighbours change nothing, loud where they do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.steps import gradients
from benchmarks.steps.gradients import measure_bits
from benchmarks.steps.regimes import BF16, FEW, BenchProgram, BenchRun
from weft.adapters.adapter import Adapter
from weft.errors import ModelError
from weft.model.backbone import Backbone
from weft.model.load import make_backbone
from weft.model.packed import PackedBatch, SlotSample, pack_samples
from weft.plan.cost.shape import SHAPES
from weft.spec import AdapterSpec

RUN = BenchRun(BenchProgram.WEFT_BITS, FEW)
BESIDE = tuple(f"differing_beside_{name}" for name in ("3", "shorter", "nan", "wide", "dropout"))


@pytest.fixture(params=["reference", "fused"])
def backbone(request: pytest.FixtureRequest) -> Backbone:
    return make_backbone(SHAPES["tiny"], BF16, torch.float32, torch.device("cpu"), request.param)


def test_bits_when_neighbours_change_nothing_then_none_differ_and_slots_are_free(backbone):
    found = measure_bits(backbone, RUN)
    assert found.extra == {"differing": 0, **dict.fromkeys(BESIDE, 0)}
    assert all(not linear.slots for linear in backbone.linears.values())


def test_bits_when_neighbours_leak_then_the_differing_are_counted(backbone, monkeypatch):
    run = Backbone.forward_backward

    def leaky(self: Backbone, batch: PackedBatch, row_tile: int | None) -> list[float]:
        losses = run(self, batch, row_tile)
        for linear in self.linears.values():
            for weights in linear.slots.values():
                weights.grad_a_RD[0, 0] += len(linear.slots)
        return losses

    monkeypatch.setattr(Backbone, "forward_backward", leaky)
    found = measure_bits(backbone, RUN)
    # One number of every one of the 7 linears of 2 layers.
    assert found.extra == {"differing": len(BESIDE) * 14, **dict.fromkeys(BESIDE, 14)}


def test_bits_when_the_planted_nan_is_not_used_then_there_is_no_figure(backbone, monkeypatch):
    new = Backbone.new_adapter

    def stale(self: Backbone, spec: AdapterSpec, seed: int) -> Adapter:
        adapter = new(self, spec, seed)
        adapter.groups["b"].params = adapter.groups["b"].params.clone()  # the modules read another buffer
        return adapter

    monkeypatch.setattr(Backbone, "new_adapter", stale)
    with pytest.raises(ModelError, match="the planted NaN did not reach its own job's loss"):
        measure_bits(backbone, RUN)


def test_bits_when_neighbours_are_shorter_then_the_job_keeps_its_length(backbone, monkeypatch):
    """So that it begins inside a block which others share."""
    seen: list[list[int]] = []

    def noting(slot_samples: list[SlotSample], *rest: Any) -> PackedBatch:
        seen.append([p.sample.length for p in slot_samples])
        return pack_samples(slot_samples, *rest)

    monkeypatch.setattr(gradients, "pack_samples", noting)
    measure_bits(backbone, RUN)
    assert [28, 28, 28, 32] in seen and [32, 32, 32, 32] in seen
