"""Stages on the fused path train every job to the bits of a fused backbone in one piece."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from staged_models import objective_jobs, odd_jobs, staged_executor
from test_staged import jobs
from tiny_models import Job, assert_same_bits, finish, job_spec, random_backbone, random_data, submit, train

from weft.engine.engine import Engine
from weft.errors import ConfigError
from weft.methods.registry import has_kernels
from weft.model.path import Memory
from weft.plan.pipeline.build import PipelinePlanner, Schedule

SCHEDULES = list(Schedule)


def fused_stages(name: str, sizes: tuple[int, ...], schedule: Schedule, **options: Any) -> Engine:
    planner = PipelinePlanner(schedule, len(sizes))
    return Engine(staged_executor(name, sizes, kernels="fused", **options), capacity=48, planner=planner)


def check_bits(name: str, cuts: dict[tuple[int, ...], Schedule], made: list[Job], **options: Any) -> None:
    num_layers = sum(next(iter(cuts)))
    whole = random_backbone(name, kernels="fused", num_hidden_layers=num_layers, **options)
    expected = train(whole, made, capacity=48)
    for sizes, schedule in cuts.items():
        engine = fused_stages(name, sizes, schedule, **options)
        submit(engine, *made)
        for job, outcome in finish(engine).items():
            assert_same_bits(outcome, expected[job])


def test_jobs_when_cut_into_two_to_four_stages_then_have_the_bits_of_one_piece():
    """Dropout, clipping, evaluations and early stopping; every schedule."""
    cuts = [(2, 2), (1, 3), (1, 1, 1, 1), (3, 1), (2, 1, 1), (1, 1, 2)]
    check_bits("llama", dict(zip(cuts, SCHEDULES, strict=True)), jobs())


def test_jobs_when_the_weights_are_bfloat16_then_have_the_bits_of_one_piece():
    check_bits("gemma3_text", {(1, 1): Schedule.ONE_F_ONE_B}, jobs(), dtype=torch.bfloat16)


@pytest.mark.parametrize("recompute", ["mlp", "full"])
def test_jobs_when_activations_are_made_again_then_have_the_bits_of_one_piece(recompute):
    check_bits("llama", {(1, 1): Schedule.ONE_F_ONE_B}, jobs()[:1], memory=Memory(recompute))


def with_kernels(made: list[Job]) -> list[Job]:
    return [job for job in made if has_kernels(job[0].adapter)]


def other_methods() -> list[Job]:
    step = {"max_steps": 2, "max_grad_norm": 0.3}
    adapters: list[dict[str, Any]] = [{"method": "ia3"}, {"method": "bitfit"}, {"r": 3, "init_lora_weights": "olora"}]
    return [
        (job_spec(f"other{seed}", adapter=adapter, **step), random_data(seed, num_samples=5))
        for seed, adapter in enumerate(adapters)
    ]


@pytest.mark.parametrize("make", [odd_jobs, objective_jobs, other_methods])
def test_methods_optimizers_and_objectives_when_cut_then_have_the_bits_of_one_piece(make):
    """Also of adapters that have no module on one of the stages."""
    made = with_kernels(make())
    assert made
    check_bits("llama_bias", {(1, 2): Schedule.MULTI_ADAPTER}, made)


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ({"method": "diff_pruning", "density": 0.05, "mask": "l0"}, "diff_pruning with these settings has no kernels"),
        ({"method": "dora", "lora_dropout": 0.1}, "dora with lora_dropout has no kernels, .*; leave lora_dropout out"),
    ],
)
def test_method_when_it_has_no_kernels_then_refused_in_a_sentence(adapter, message):
    engine = fused_stages("llama", (1, 1), Schedule.ONE_F_ONE_B)
    spec = job_spec("job", adapter=adapter)
    assert not has_kernels(spec.adapter)
    with pytest.raises(ConfigError, match=message):
        engine.submit(spec, random_data(0))
