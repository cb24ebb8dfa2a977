"""Modules with a learning rate of their own step as torch's parameter groups would have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import job_spec, random_data, shallow_backbone

from weft.engine.engine import Engine
from weft.engine.execute.optimizers import optimizer_of
from weft.engine.execute.optimizers.optimizer import step_together
from weft.errors import ConfigError
from weft.spec.choices import OPTIMIZERS

FACTORS = {"q_proj": 0.1, r"layers\.0\..*": 3.0}


@pytest.fixture(scope="module")
def backbone():
    return shallow_backbone("llama_odd")


def factor_of(path: str) -> float:
    return 0.1 if path.endswith("q_proj") else 3.0 if ".layers.0." in path else 1.0


def make(backbone: Any, optim: str, patterns: dict[str, float]) -> Any:
    spec = job_spec("me", optim=optim, weight_decay=0.1, learning_rate_pattern=patterns)
    return optimizer_of(backbone.new_adapter(spec.adapter, 1), spec)


def step(optimizer: Any, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for group in optimizer.adapter.groups.values():
        group.grad.copy_(torch.randn(group.grad.shape, generator=generator) / 50)
    optimizer.set_rate(1e-3)
    assert not step_together([optimizer], [number != 5])()[0].error


def test_adamw_when_modules_have_rates_then_equals_torch_with_parameter_groups(backbone):
    """Over 24 steps, one of them left out."""
    mine = make(backbone, "adamw", FACTORS)
    params = {path: [torch.nn.Parameter(t) for t in tensors] for path, tensors in mine.adapter.tensors().items()}
    groups = [{"params": own, "lr": 1e-3 * factor_of(path)} for path, own in params.items()]
    oracle = torch.optim.AdamW(groups, weight_decay=0.1)
    for number in range(24):
        generator = torch.Generator().manual_seed(number)
        flat = {
            name: torch.randn(group.grad.shape, generator=generator) / 50 for name, group in mine.adapter.groups.items()
        }
        for path, grads in mine.adapter.split(flat).items():
            for param, grad in zip(params[path], grads, strict=True):
                param.grad = grad.clone()
        torch.nn.utils.clip_grad_norm_([p for own in params.values() for p in own], 1.0)
        if number != 5:
            oracle.step()
        step(mine, number)
    for path, found in mine.adapter.tensors().items():
        for x, y in zip(found, params[path], strict=True):
            assert (x - y).norm() <= 1e-6 * y.norm(), path


@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_kind_when_no_module_has_another_rate_then_no_bit_changes_and_with_zero_none_moves(backbone, optim):
    plain, same, frozen = (make(backbone, optim, p) for p in ({}, {"q_proj": 1.0}, {"v_proj": 0.0}))
    start = frozen.adapter.tensors()
    for optimizer in (plain, same, frozen):
        for number in range(3):
            step(optimizer, number)
    ends = [optimizer.adapter.tensors() for optimizer in (plain, same, frozen)]
    for path, tensors in ends[0].items():
        assert all(x.equal(y) for x, y in zip(tensors, ends[1][path], strict=True))
        other = start if path.endswith("v_proj") else ends[0]
        assert all(x.equal(y) for x, y in zip(ends[2][path], other[path], strict=True))


def test_pattern_when_no_module_answers_then_is_refused_by_name(backbone):
    spec = job_spec("me", learning_rate_pattern={"q_prj": 2.0})
    with pytest.raises(
        ConfigError, match="learning_rate_pattern: matches no adapted module: 'q_prj'; modules have names such"
    ):
        Engine(backbone, capacity=48).submit(spec, random_data(1))
