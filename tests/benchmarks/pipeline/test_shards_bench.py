"""What is measured of shards on a GPU runs on a CPU too, with the bits of the whole model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.clock import QUICK
from benchmarks.pipeline.gpu_costs import measure_shards
from benchmarks.pipeline.parts import ON_GPU, choose_parts
from weft.errors import ConfigError
from weft.kernels.device import CPU
from weft.plan.cost.shape import SHAPES


def test_shards_when_measured_on_a_small_shape_then_gradients_are_those_of_the_whole():
    found = measure_shards(CPU, replace(SHAPES["tiny"], layers=4), 256, QUICK)
    assert found["shard_bits"] == 0
    assert found["shard_gather_s"] > 0
    share = (found["shard_step_s"] - found["shard_whole_s"]) / found["shard_gather_s"]
    assert found["shard_overlap"] == pytest.approx(1 - share)


def test_overlap_when_there_is_no_gpu_then_is_not_measured(monkeypatch):
    monkeypatch.setattr("benchmarks.pipeline.parts.default_device", lambda: CPU)
    assert not ON_GPU & choose_parts([], None).keys()
    with pytest.raises(ConfigError, match="shard_overlap needs a CUDA GPU"):
        choose_parts(["shard_overlap"], None)
