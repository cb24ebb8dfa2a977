"""Gradients of whole steps on a GPU: the same bits beside any neighbours, and near the reference path."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.steps.gradients import LARGEST_ERROR, measure_agreement, measure_bits
from benchmarks.steps.regimes import BF16, FP8, INT8, NF4, BenchProgram, BenchRun, Workload
from weft.model.load import Storage, make_backbone
from weft.plan.cost.shape import find_shape
from weft.plan.families import FAMILIES

pytestmark = pytest.mark.gpu
SHAPES = ("llama-3.2-1b", "qwen2.5-0.5b", "qwen3-8b", "mistral-7b", "phi-4-mini", "gemma-3-4b")
SHAPES += ("smollm3-3b", "olmo-3-7b", "ministral-3-8b", "granite-3.3-2b", "granite-4.0-micro")
"""A shape of every family on the fast path."""
EIGHT = Workload((16,) * 8, (128, 256), 2048)
GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("storage", [BF16, FP8, INT8, NF4], ids=lambda storage: storage.quantize)
def test_gradients_when_neighbours_differ_then_no_bit_does(storage: Storage):
    """Alone, beside others, shorter, wider, NaN and dropout: the job's own gradients are the same."""
    backbone = make_backbone(replace(find_shape("llama-3.2-1b"), layers=2), storage, torch.bfloat16, GPU, "fused")
    found = measure_bits(backbone, BenchRun(BenchProgram.WEFT_BITS, EIGHT, storage))
    assert found.extra["differing"] == 0, found.detail


def test_shapes_when_listed_then_have_every_family_on_the_fast_path():
    named = {find_shape(name).config().model_type for name in SHAPES}
    assert named == set(FAMILIES)


@pytest.mark.parametrize("name", SHAPES)
def test_gradients_when_computed_by_kernels_then_are_near_the_reference(name: str):
    """Every class of ranks, with dropout and without, for every family on the fast path."""
    found = measure_agreement(find_shape(name), torch.bfloat16, GPU, print)
    assert found.value <= LARGEST_ERROR, found.detail
