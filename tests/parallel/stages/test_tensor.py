"""Jobs on devices that share every layer end as on one device, to 1e-5, and with the same bits every time."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import slow
from safetensors.torch import load_file
from staged_models import objective_jobs, train_until
from tensor_models import tensor_executor
from test_spread import AnyDispatch
from tiny_models import (
    Job,
    Outcome,
    assert_same_bits,
    finish,
    job_spec,
    random_backbone,
    random_data,
    submit,
    train,
)

from weft.engine.engine import Engine
from weft.errors import ConfigError
from weft.plan.cost.types import LinearCost
from weft.plan.pipeline.build import PipelinePlanner, Schedule
from weft.plan.spread import SpreadPlanner

LAYOUTS = {"tensor:2": (2, (2,)), "tensor:2,stages:2": (2, (1, 1)), "tensor:4": (4, (2,))}
MODEL: dict[str, Any] = {"num_key_value_heads": 4}
FEW = ("lora", "dora", "ia3", "prefix")


def jobs(names: Collection[str] | None = None, *, num_steps: int = 20, epsilon: float = 1e-8) -> list[Job]:
    """Several methods and ranks, clipped, with dropout, on one microbatch; one is evaluated."""
    adapters: dict[str, dict[str, Any]] = {
        "lora": {"r": 3, "lora_dropout": 0.2},
        "high_rank": {"r": 16, "lora_dropout": 0.1},
        "pissa": {"r": 4, "init_lora_weights": "pissa"},
        "dora": {"method": "dora", "r": 4, "lora_dropout": 0.1},
        "vera": {"method": "vera", "vera_rank": 8, "lora_dropout": 0.1},
        "ia3": {"method": "ia3"},
        "bitfit": {"method": "bitfit"},
        "bottleneck": {"method": "bottleneck", "bottleneck_size": 5},
        "prompt": {"method": "prompt_tuning", "num_virtual_tokens": 3},
        "prefix": {"method": "prefix_tuning", "num_virtual_tokens": 3},
    }
    found: list[Job] = []
    for seed, (name, adapter) in enumerate(adapters.items()):
        if names is not None and name not in names:
            continue
        evaluated = {"eval_data": 2, "eval_steps": 5} if name == "lora" else {}
        step = {"max_steps": num_steps, "max_grad_norm": 0.05 if seed % 2 else 1.0, "weight_decay": 0.1}
        step["adam_epsilon"] = epsilon
        spec = job_spec(name, seed=seed, adapter=adapter, learning_rate=1e-3, **step, **evaluated)
        found.append((spec, random_data(seed, num_samples=6, num_eval=2 if evaluated else 0)))
    return found


def engine_on(layout: str, **options: Any) -> Engine:
    count, sizes = LAYOUTS[layout]
    planner = PipelinePlanner(Schedule.ONE_F_ONE_B, len(sizes))
    return Engine(tensor_executor("llama", count, sizes, **MODEL, **options), capacity=48, planner=planner)


def trained(layout: str, given: list[Job], **options: Any) -> dict[str, Outcome]:
    engine = engine_on(layout, **options)
    submit(engine, *given)
    found = finish(engine)
    engine.close()
    return found


def assert_near(mine: Outcome, other: Outcome, tolerance: float = 1e-5) -> None:
    assert mine.state == other.state
    assert mine.losses == pytest.approx(other.losses, rel=tolerance)
    assert mine.eval_losses == pytest.approx(other.eval_losses, rel=tolerance)
    assert mine.adapter.keys() == other.adapter.keys()
    for path, tensors in mine.adapter.items():
        for x, y in zip(tensors, other.adapter[path], strict=True):
            assert x.shape == y.shape
            assert (x - y).abs().max() <= tolerance * y.abs().max().clamp(min=1), path


@pytest.mark.parametrize(
    ("layout", "names", "num_steps"),
    [
        ("tensor:2,stages:2", FEW, 6),
        slow("tensor:4", ("lora", "high_rank"), 20),
        *(slow(layout, None, 20) for layout in ("tensor:2", "tensor:2,stages:2")),
    ],
)
def test_jobs_when_layers_are_shared_then_end_near_those_of_one_device(layout, names, num_steps):
    """Adam makes steps of rounding: with its usual epsilon, numbers whose gradient crosses zero end up to 6e-5 off."""
    given = jobs(names, num_steps=num_steps, epsilon=1e-3)
    expected = train(random_backbone("llama", **MODEL), given, capacity=48)
    for name, outcome in trained(layout, given).items():
        assert len(outcome.losses) == num_steps
        assert_near(outcome, expected[name], tolerance=1e-6)


def test_jobs_when_trained_twice_then_have_the_same_bits():
    """Devices are added up in their order."""
    first, second = (trained("tensor:2,stages:2", jobs(FEW, num_steps=3)) for _ in range(2))
    for name, outcome in first.items():
        assert_same_bits(outcome, second[name])


@pytest.mark.parametrize("kernels", ["reference", "fused"])
def test_sums_in_any_order_when_replicas_share_layers_then_no_dealing_changes_a_bit(kernels):
    """Devices of all replicas add up whole numbers; samples are dealt at random over two replicas."""
    free = {"gradient_sum": "any_order", "max_steps": 3, "max_grad_norm": 0.05}
    own: list[Job] = [
        (job_spec("free", adapter={"lora_dropout": 0.1, "r": 3}, **free), random_data(1, num_samples=8)),
        (job_spec("again", seed=2, **free), random_data(2, num_samples=5)),
        *(jobs(("dora",), num_steps=3) if kernels == "reference" else ()),
        *([(replace(spec, gradient_sum="any_order"), data) for spec, data in objective_jobs()[:1]]),
    ]
    expected = train(random_backbone("llama", kernels=kernels, **MODEL), own, capacity=48)
    planner = AnyDispatch(SpreadPlanner((1, 1), (LinearCost(fixed_s=4.0),) * 2), random.Random(1))
    two = Engine(tensor_executor("llama", 2, (2,), (2,), kernels=kernels, **MODEL), capacity=48, planner=planner)
    submit(two, *own)
    found, one = finish(two), trained("tensor:2", own, kernels=kernels)
    two.close()
    for name, outcome in found.items():
        assert_same_bits(outcome, one[name])
        assert_near(outcome, expected[name])


def test_objectives_when_layers_are_shared_then_end_near_those_of_one_device():
    """A head for labels is whole on every device, and pairs share a microbatch."""
    expected = train(random_backbone("llama", **MODEL), objective_jobs(), capacity=48)
    for name, outcome in trained("tensor:2", objective_jobs()).items():
        assert_near(outcome, expected[name])


@pytest.mark.parametrize("optim", ["muon", "adafactor", slow("lion"), slow("sgd")])
def test_optimizers_when_layers_are_shared_then_see_whole_tensors(optim):
    given = [(job_spec("job", optim=optim, adapter={"r": 3}, ema_decay=0.9, max_steps=3), random_data(1))]
    expected = train(random_backbone("llama", **MODEL), given, capacity=48)
    assert_near(trained("tensor:2", given)["job"], expected["job"])


def resumed_jobs() -> list[Job]:
    specs = [job_spec("a", ema_decay=0.5, adapter={"lora_dropout": 0.1, "r": 3}), job_spec("b", optim="adafactor")]
    return [(spec, random_data(seed)) for seed, spec in enumerate(specs)]


def test_run_when_it_moves_between_layouts_then_files_have_the_keys_and_shapes_of_one_device(tmp_path):
    """From one device to devices that share layers, with and without stages, and back."""

    def whole() -> Engine:
        return Engine(random_backbone("llama", **MODEL), capacity=48)

    train_until(whole(), tmp_path / "one", 6, resumed_jobs())
    for until, layout in ((2, "tensor:2"), (3, None), (4, "tensor:2,stages:2"), (6, "tensor:4")):
        train_until(whole() if layout is None else engine_on(layout), tmp_path / "moved", until, resumed_jobs())
    files = [path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*.safetensors")]
    assert any(path.name == "adapter_model.safetensors" for path in files)
    for path in files:
        assert_near_files(tmp_path / "one" / path, tmp_path / "moved" / path)


def assert_near_files(one: Path, moved: Path) -> None:
    expected, found = load_file(one), load_file(moved)
    assert {name: (x.shape, x.dtype) for name, x in found.items()} == {
        name: (x.shape, x.dtype) for name, x in expected.items()
    }
    for name, x in expected.items():
        torch.testing.assert_close(
            found[name], x, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{moved} {name}: {text}"
        )


@pytest.mark.parametrize(
    ("settings", "where", "why"),
    [
        (
            {"adapter": {"method": "diff_pruning"}},
            "adapter.method",
            "diff_pruning chooses among the numbers of whole weights; with tensor:N use bitfit, bottleneck, dora, ia3, "
            "lora, prefix_tuning, prompt_tuning, vera.",
        ),
    ],
)
def test_job_when_it_cannot_share_layers_then_is_refused_in_a_sentence(settings, where, why):
    engine = engine_on("tensor:2")
    with pytest.raises(ConfigError) as refused:
        engine.submit(job_spec("job", **settings), random_data(1))
    assert (refused.value.where, refused.value.message) == (where, why)
    submit(engine, (job_spec("other", max_steps=1), random_data(2)))
    assert finish(engine)["other"].state == "succeeded"
