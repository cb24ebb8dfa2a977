"""Weft's side: the right model, whole steps of all jobs, and a frozen step that really runs its backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.clock import QUICK
from benchmarks.steps.regimes import BF16, FEW, HANDFUL, BenchProgram, BenchRun, packed_samples
from benchmarks.steps.step import BenchJobs, measure
from weft.adapters.frozen import Dense
from weft.errors import JobError
from weft.model.backbone import Backbone
from weft.model.load import Storage, build, make_backbone
from weft.plan.cost.shape import SHAPES

CPU = torch.device("cpu")
TINY = SHAPES["tiny"]


@pytest.fixture(params=["reference", "fused"])
def backbone(request: pytest.FixtureRequest) -> Backbone:
    return make_backbone(TINY, BF16, torch.float32, CPU, request.param)


def test_losses_when_compared_with_transformers_on_the_same_shape_then_are_equal(backbone):
    model = build(TINY, torch.float32, CPU, "sdpa")
    jobs = BenchJobs(backbone, HANDFUL)
    losses = backbone.forward_backward(jobs.batch, jobs.row_tile)
    samples = [sample for own in packed_samples(HANDFUL, TINY.vocabulary) for sample in own]
    for sample, loss in zip(samples, losses, strict=True):
        ids = torch.from_numpy(sample.tokens.astype("int64"))[None]
        expected = model(input_ids=ids, labels=ids).loss * (sample.length - 1)
        assert loss == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize("quantize", ["fp8", "int8", "nf4"])
def test_backbone_when_quantised_then_is_near_the_plain_one(quantize):
    backbone = make_backbone(TINY, BF16, torch.float32, CPU)
    rounded = make_backbone(TINY, Storage(quantize), torch.float32, CPU)
    assert {linear.frozen.kind for linear in rounded.linears.values()} == {quantize}
    # Losses of random weights hardly depend on them, so hidden states are compared.
    batch, row_tile = BenchJobs(backbone, HANDFUL, frozen=True).batch, backbone.path.row_tile(HANDFUL.capacity)
    plain, found = (one.path.hidden(batch, row_tile) for one in (backbone, rounded))
    error = float((found - plain).norm() / plain.norm())
    assert 1e-4 < error < 0.1


def test_step_when_taken_then_moves_every_adapter_and_clears_gradients(backbone):
    jobs = BenchJobs(backbone, FEW)
    before = [adapter.groups["b"].params.clone() for adapter in jobs.adapters]
    jobs.step()
    for adapter, old in zip(jobs.adapters, before, strict=True):
        assert not torch.equal(adapter.groups["b"].params, old)
        assert not adapter.groups["b"].grad.any()


def test_step_when_a_loss_is_not_finite_then_there_is_no_figure(backbone):
    jobs = BenchJobs(backbone, FEW)
    jobs.adapters[0].groups["a"].params.fill_(float("nan"))
    jobs.adapters[0].groups["b"].params.fill_(1.0)
    jobs.adapters[0].changed()
    jobs.step()
    with pytest.raises(JobError, match="losses or gradients are not finite"):
        jobs.look()


def test_measure_when_done_then_slots_are_free_and_tokens_are_counted(backbone):
    measured = measure(backbone, BenchRun(BenchProgram.WEFT, FEW), QUICK)
    assert (measured.tokens, measured.rows) == (128, 128)
    assert measured.seconds > 0
    assert 0 < measured.extra["optimizer_ms"] < measured.seconds * 1e3
    assert all(not linear.slots for linear in backbone.linears.values())


def test_measure_when_a_step_fails_then_slots_are_free(backbone, monkeypatch):
    monkeypatch.setattr(BenchJobs, "step", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        measure(backbone, BenchRun(BenchProgram.WEFT, FEW), QUICK)
    assert all(not linear.slots for linear in backbone.linears.values())


def test_frozen_step_when_run_then_the_whole_backward_runs(backbone, monkeypatch):
    seen = []
    input_gradient = Dense.input_gradient

    def counted(self: Dense, *arguments: Any, **named: Any) -> torch.Tensor:
        seen.append(self.shape)
        return input_gradient(self, *arguments, **named)

    monkeypatch.setattr(Dense, "input_gradient", counted)
    jobs = BenchJobs(backbone, FEW, frozen=True)
    jobs.forward_backward_frozen()
    # All products of both layers; the fused step joins some and has no use for the first one's.
    assert len(seen) == (7 if backbone.path.name == "fused" else 14)
    measured = measure(backbone, BenchRun(BenchProgram.WEFT_FROZEN, FEW), QUICK)
    assert measured.detail.startswith("no adapters; with them, in turn, ")
    assert measured.extra["overhead"] > -1 and not any(linear.slots for linear in backbone.linears.values())
