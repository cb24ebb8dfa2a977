"""Jobs on devices that share every layer end on the fused path as on one device, by the kernels' reference code."""

from __future__ import annotations

import pytest
import torch
from covering import chosen, slow
from tensor_models import loaded_executor
from test_tensor import FEW, MODEL, assert_near, engine_on, jobs
from tiny_models import (
    Job,
    Outcome,
    assert_same_bits,
    finish,
    job_spec,
    random_backbone,
    random_data,
    random_model,
    small_job,
    submit,
    train,
)
from transformers import AutoTokenizer

from weft.engine.engine import Engine
from weft.methods.registry import has_kernels
from weft.model.load import load_backbone
from weft.model.source import TINY
from weft.plan.pipeline.build import PipelinePlanner, Schedule
from weft.spec import BackboneSpec


def trained(engine: Engine, given: list[Job]) -> dict[str, Outcome]:
    submit(engine, *given)
    found = finish(engine)
    engine.close()
    return found


def with_kernels(made: list[Job]) -> list[Job]:
    return [job for job in made if has_kernels(job[0].adapter)]


@pytest.mark.parametrize(
    ("layout", "names", "num_steps"),
    [
        ("tensor:2", ("lora", "high_rank"), 6),
        *(slow(layout, None, 20) for layout in ("tensor:2", "tensor:2,stages:2")),
    ],
)
def test_jobs_when_layers_are_shared_then_end_near_those_of_one_device(layout, names, num_steps):
    """Clipped, with dropout and an evaluation; LoRA, and all methods that have kernels.

    With Adam's usual epsilon, numbers whose gradient crosses zero end 1.1e-5 off.
    """
    given = with_kernels(jobs(names, num_steps=num_steps, epsilon=1e-3))
    expected = train(random_backbone("llama", kernels="fused", **MODEL), given, capacity=48)
    found = trained(engine_on(layout, kernels="fused"), given)
    assert found.keys() == expected.keys() == {spec.name for spec, _ in given}
    for name, outcome in found.items():
        assert len(outcome.losses) == num_steps
        assert_near(outcome, expected[name], tolerance=1e-6)


def test_jobs_when_trained_twice_then_have_the_same_bits():
    """Stages of two devices each, in bfloat16; every method that one of these devices has a part of."""
    given = with_kernels(jobs((*FEW, "pissa", "vera", "bitfit"), num_steps=3))
    options = {"kernels": "fused", "dtype": torch.bfloat16}
    first, second = (trained(engine_on("tensor:2,stages:2", **options), given) for _ in range(2))
    assert len(first) == len(given)
    for name, outcome in first.items():
        assert_same_bits(outcome, second[name])


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose parts hold whole blocks of every storage."""
    path = tmp_path_factory.mktemp("models") / "llama"
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
    random_model("llama_bias", **sizes).save_pretrained(path)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(path)
    return str(path)


@pytest.mark.parametrize(
    ("quantize", "tolerance"), chosen([("none", 1e-5), ("int8", 1e-5), ("nf4", 1e-5), ("fp8", 0.05)], 2, 3)
)
def test_jobs_when_frozen_weights_are_stored_otherwise_then_the_parts_have_their_numbers(wide, quantize, tolerance):
    """FP8 rounds what is multiplied row by row, and here a part of it."""
    spec = BackboneSpec(wide, device="cpu", quantize=quantize, kernels="fused")
    step = {"max_steps": 3, "optim": "sgd"}
    dora = job_spec("dora", adapter={"method": "dora", "r": 4}, **step), random_data(1, num_samples=7)
    given = [small_job("lora", **step), dora]
    expected = train(load_backbone(spec), given, capacity=48)
    engine = Engine(loaded_executor(spec, 2), capacity=48, planner=PipelinePlanner(Schedule.ONE_F_ONE_B, 1))
    for name, outcome in trained(engine, given).items():
        assert_near(outcome, expected[name], tolerance)


def test_start_when_it_makes_up_for_what_parts_have_lost_then_is_that_of_one_device(wide):
    """loftq reads the whole weight from the model's files."""
    spec = BackboneSpec(wide, device="cpu", quantize="nf4", kernels="fused")
    adapter = {"r": 4, "init_lora_weights": "loftq"}
    given = [(job_spec("job", max_steps=1, optim="sgd", adapter=adapter), random_data(1, num_samples=7))]
    expected = train(load_backbone(spec), given, capacity=48)
    engine = Engine(loaded_executor(spec, 2), capacity=48, planner=PipelinePlanner(Schedule.ONE_F_ONE_B, 1))
    assert_near(trained(engine, given)["job"], expected["job"])
