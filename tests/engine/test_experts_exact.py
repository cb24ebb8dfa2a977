"""Adapters on routed experts: each equals the one that PEFT or plain torch trains alone, with the same bits beside any
neighbours."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import peft
import pytest
import torch
from covering import slow
from peft_experts import as_peft
from test_exact import BOUND, Tensors, largest_difference, train_peft_model
from tiny_models import (
    Job,
    assert_same_bits,
    dataset,
    finish,
    job_spec,
    random_backbone,
    random_data,
    random_model,
    train,
)
from torch import nn
from torch.nn.utils import parametrize

from weft.data.dataset import JobData
from weft.data.samples import Sample
from weft.engine.engine import Engine
from weft.engine.events import JobStarted
from weft.engine.jobs.live_job import LiveJob
from weft.errors import ConfigError
from weft.spec import AdapterSpec

OTHER_FAMILIES = (
    "mixtral",
    "olmoe",
    "granitemoe",
    "granitemoehybrid_mamba",
    "qwen2_moe",
    "qwen3_5_moe_text",
    "qwen3_next",
    "lfm2_moe",
    "nemotron_h",
    "deepseek_v3",
    "glm4_moe",
    "glm4_moe_lite",
    "gemma4_moe",
)
CAPACITY = 40
STEPS = 20


def expert_job(name: str, kind: str, seed: int, *, steps: int = 5, **adapter: Any) -> Job:
    adapter = {"r": 4, "experts": kind, "target_modules": r".*\.(q_proj|q_b_proj)", **adapter}
    settings = {"max_steps": steps, "adam_epsilon": 1e-3, "global_batch_size": 5}
    return job_spec(name, adapter=adapter, seed=seed, **settings), random_data(seed, num_samples=9)


def expert_paths(start: Tensors) -> list[str]:
    return [path for path, own in start.items() if own[0].ndim == 3]


def peft_model(plain: Any, job: LiveJob, start: Tensors) -> Any:
    """PEFT's own adapters on linears and on the parameters of experts, set to where our job started."""
    adapter, experts = job.spec.adapter, expert_paths(start)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=adapter.r,
        lora_alpha=2 * adapter.r,
        target_modules=[path for path in start if path not in experts],
        target_parameters=experts,
        rank_pattern=dict.fromkeys(experts, adapter.rank_of_experts),
        alpha_pattern=dict.fromkeys(experts, adapter.alpha_of_experts),
    )
    model = peft.get_peft_model(copy.deepcopy(plain), config)
    with torch.no_grad():
        for path, tensors in start.items():
            for theirs, mine in zip(tensors_at(model, path), as_peft(path, tensors), strict=True):
                theirs.copy_(mine)
    return model


def tensors_at(model: Any, path: str) -> list[torch.Tensor]:
    """PEFT's A and B of a linear or of a parameter of experts."""
    module = model.base_model.model
    for name in path.split("."):
        if hasattr(module, "parameter_name"):
            break
        module = getattr(module, name)
    while hasattr(module, "parameter_name") and module.parameter_name != path.rpartition(".")[2]:
        module = module.base_layer
    return [module.lora_A["default"].weight, module.lora_B["default"].weight]


class SharedFactors(nn.Module):
    """A parametrization by plain torch: W_e plus the products of factors that experts may share."""

    def __init__(self, parts: list[tuple[torch.Tensor, ...]], scale: float, experts: Any) -> None:
        super().__init__()
        self.factors = nn.ParameterList(nn.Parameter(x.clone()) for part in parts for x in part)
        self.scale, self.is_transposed, self.in_turns = scale, experts.is_transposed, not experts.is_concatenated

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        pairs = zip(self.factors[0::2], self.factors[1::2], strict=True)
        updates = [(b @ a).expand(len(weight), -1, -1) for a, b in pairs]
        update_EOD = torch.stack(updates, dim=2).flatten(1, 2) if self.in_turns else torch.cat(updates, dim=1)
        return weight + self.scale * (update_EOD.transpose(1, 2) if self.is_transposed else update_EOD)


class SharedModel:
    """PEFT's adapters on linears, and shared factors on experts."""

    def __init__(self, plain: Any, job: LiveJob, start: Tensors) -> None:
        adapter, experts = job.spec.adapter, expert_paths(start)
        linears = {path: own for path, own in start.items() if path not in experts}
        self.model = peft_model(plain, job, linears)
        self.own: dict[str, list[torch.Tensor]] = {}
        products = {path.rpartition(".")[0] for path in experts}
        for product in products:
            module = self.model.get_submodule(f"base_model.model.{product}")
            up = [f"{product}.{name}" for name in ("gate_proj", "up_proj") if f"{product}.{name}" in experts]
            first = "gate_up_proj" if module.has_gate else "up_proj"
            for name, paths in {first: up, "down_proj": [f"{product}.down_proj"]}.items():
                factors = SharedFactors([start[path] for path in paths], adapter.scale_for(paths[0]), module)
                parametrize.register_parametrization(module, name, factors)
                getattr(module.parametrizations, name).original.requires_grad_(False)
                for index, path in enumerate(paths):
                    self.own[path] = list(factors.factors[2 * index : 2 * index + 2])


def assert_equal_alone(name: str, given: list[Job]) -> None:
    plain = random_model(name)
    plain.set_attn_implementation("eager")
    engine = Engine(random_backbone(name), capacity=CAPACITY)
    for spec, data in given:
        engine.submit(spec, data)
    starts = {job: engine.executor.adapter_of(job) for job in engine.jobs}
    outcomes = finish(engine)
    for job, live in engine.jobs.items():
        start = starts[job]
        if live.spec.adapter.experts == "shared":
            oracle = SharedModel(plain, live, start)
            linears = [path for path in start if path not in oracle.own]
            expected, losses, _ = train_peft_model(oracle.model, live, linears)
            expected |= {path: tuple(own) for path, own in oracle.own.items()}
            mine = outcomes[job].adapter
        else:
            model = peft_model(plain, live, start)
            _, losses, _ = train_peft_model(model, live, [])
            expected = {path: tuple(tensors_at(model, path)) for path in start}
            mine = {path: as_peft(path, own) for path, own in outcomes[job].adapter.items()}
            start = {path: as_peft(path, own) for path, own in start.items()}
        assert outcomes[job].losses == pytest.approx(losses, rel=BOUND)
        assert largest_difference(mine, {p: tuple(x.detach() for x in own) for p, own in expected.items()}) <= BOUND
        experts = expert_paths(outcomes[job].adapter)
        if live.spec.adapter.experts != "none":
            assert len(experts) >= 2 and largest_difference({p: mine[p] for p in experts}, start) > 0.01


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", *map(slow, OTHER_FAMILIES)])
def test_adapters_on_experts_when_trained_together_then_each_equals_the_one_trained_alone(name):
    assert_equal_alone(
        name,
        [
            expert_job("full", "full", 1, expert_r=2, steps=STEPS),
            expert_job("shared", "shared", 2, steps=STEPS),
            expert_job("frozen", "none", 3, steps=STEPS),
        ],
    )


@pytest.fixture(scope="module")
def backbone():
    return random_backbone("qwen3_moe")


@pytest.fixture(scope="module")
def alone(backbone):
    return {job[0].name: train(backbone, [job], capacity=CAPACITY)[job[0].name] for job in jobs()}


def jobs() -> list[Job]:
    return [expert_job("full", "full", 1, expert_r=3), expert_job("shared", "shared", 2)]


@pytest.mark.parametrize("capacity", [40, 200])
def test_adapters_on_experts_when_beside_others_then_have_the_bits_they_have_alone(backbone, alone, capacity):
    """Beside other ranks, bare jobs and in other microbatches, with some experts that get none of a sample's rows."""
    others = [expert_job("other", "shared", 5, r=2), expert_job("frozen", "none", 3), expert_job("wide", "full", 6)]
    outcomes = train(backbone, [others[0], *jobs(), *others[1:]], capacity=capacity)
    for name, expected in alone.items():
        assert_same_bits(outcomes[name], expected)


@pytest.mark.parametrize("kind", ["full", "shared"])
def test_adapters_on_experts_when_a_neighbour_is_nan_then_do_not_notice(backbone, alone, kind):
    def spoil(engine: Engine, event: Any) -> None:
        if isinstance(event, JobStarted) and event.job == "bad":
            for group in engine.executor.jobs["bad"].weights.adapter.groups.values():
                group.params.fill_(float("nan"))

    outcomes = train(backbone, [expert_job("bad", kind, 9), *jobs()], capacity=CAPACITY, on_event=spoil)
    assert outcomes["bad"].state == "failed"
    for name, expected in alone.items():
        assert_same_bits(outcomes[name], expected)


def test_adapters_on_experts_when_a_neighbour_sends_all_rows_to_one_expert_then_do_not_notice(backbone, alone):
    """The router reads the hidden state, so a job whose samples are one token repeated has one choice for all rows."""
    spec, data = expert_job("crowd", "full", 4)
    samples = [Sample(np.full_like(each.tokens, 7), each.supervised) for each in data.train.samples]
    outcomes = train(backbone, [(spec, JobData(dataset(samples), None)), *jobs()], capacity=CAPACITY)
    for name, expected in alone.items():
        assert_same_bits(outcomes[name], expected)


@pytest.mark.parametrize("method", ["dora", "ia3", "vera"])
def test_experts_when_the_method_cannot_train_them_then_refused(method):
    with pytest.raises(ConfigError, match=rf"is a setting of lora; the method is {method}"):
        AdapterSpec(method=method, experts="full")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"experts": "full", "lora_dropout": 0.1}, "lora_dropout: experts have no dropout"),
        ({"experts": "full", "init_lora_weights": "pissa"}, "init_lora_weights: pissa is not possible on experts"),
        ({"expert_r": 2}, "expert_r: is for routed experts, which stay frozen"),
        ({"experts": "all"}, "experts: got 'all'; accepted are none, full, separate, shared"),
    ],
)
def test_settings_of_experts_when_they_exclude_each_other_then_refused(settings, message):
    with pytest.raises(ConfigError) as caught:
        AdapterSpec(**settings)
    assert message in str(caught.value)


def test_experts_when_the_backbone_has_none_then_refused():
    with pytest.raises(ConfigError, match="no routed experts"):
        random_backbone("llama").new_adapter(AdapterSpec(r=2, experts="full"), 0)
