"""Stages and spread replicas of a quantised backbone train every job to the bits of one device."""

from __future__ import annotations

import pytest
from covering import slow
from tiny_models import assert_same_bits, finish, small_job, submit, train

from benchmarks.pipeline.in_process import LocalStages
from weft.engine.engine import Engine
from weft.model.load import load_backbone
from weft.model.resolve import resolve
from weft.parallel.stages.load_stages import find_parts
from weft.parallel.stages.staged import StagedExecutor
from weft.plan.cost.types import LinearCost
from weft.plan.pipeline.build import PipelinePlanner, Schedule
from weft.plan.planner import Planner
from weft.plan.spread import SpreadPlanner
from weft.spec import BackboneSpec

JOBS = [small_job("a", max_steps=2, max_grad_norm=0.05), small_job("b", 1, max_steps=2, gradient_sum="any_order")]


@pytest.mark.parametrize(("quantize", "kernels"), [("nf4", "fused"), slow("int8", "reference"), ("fp8", "reference")])
def test_jobs_when_the_backbone_is_quantised_then_have_the_bits_of_one_device(quantize, kernels):
    """Of two stages, and of two replicas that share the samples of one job."""
    spec = BackboneSpec("tiny", device="cpu", quantize=quantize, kernels=kernels)
    expected = train(load_backbone(spec), JOBS, capacity=48)
    layouts: list[tuple[list[int], Planner]] = [
        ([2], PipelinePlanner(Schedule.ONE_F_ONE_B, 2)),
        ([1, 1], SpreadPlanner((1, 1), (LinearCost(), LinearCost()))),
    ]
    for sizes, planner in layouts:
        replicas = [[load_backbone(spec, part) for part in find_parts(resolve(spec), size)] for size in sizes]
        executor = StagedExecutor(LocalStages(*replicas), replicas[0][0].tokenizer)
        engine = Engine(executor, capacity=48, planner=planner)
        submit(engine, *JOBS)
        for name, outcome in finish(engine).items():
            assert_same_bits(outcome, expected[name])
