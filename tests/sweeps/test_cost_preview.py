"""A sweep is planned with the configurations it would try and the settings it would run with."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_families import plain_model

from benchmarks.sweeps.plan_check import violations
from weft.engine.execute.local import executor_on
from weft.errors import ConfigError, PlanError
from weft.model.load import load_skeleton
from weft.model.resolve import resolve
from weft.model.source import TINY
from weft.plan.cost.hardware import DEVICES, find_hardware
from weft.spec import AdapterSpec
from weft.spec.load_sweep import sweep_from_mapping
from weft.sweeps.configure import Configurations
from weft.sweeps.planned_packs import plan_elsewhere, sampled


def planned(given):
    spec = sweep_from_mapping(given, base_dir=Path())
    return sampled(spec, Configurations(spec, executor_on(load_skeleton(resolve(spec.backbone))), Path()))


def test_configurations_when_sampled_then_are_different_and_as_many_as_the_budget_allows(settings):
    space = {"r": [2, 4], "lr": [1e-3, 2e-3], "target_modules": [["q_proj", "v_proj"], "all-linear"]}
    found = planned(settings(space=space, sampler="random", trials=8))
    kinds = [(c.rank, c.targets) for c in found]
    assert [c.name for c in found] == [f"t00{i}" for i in range(8)]
    assert sorted(kinds.count(kind) for kind in set(kinds)) == [2, 2, 2, 2]
    assert {c.targets for c in found} == {("q_proj", "v_proj"), "all-linear"}
    each = found[0].num_tokens
    ranges = {"lr": {"min": 1e-3, "max": 2e-3}}
    assert len(planned(settings(space=ranges, max_tokens=3 * each))) == 3
    assert len(planned(settings(space=ranges, max_seconds=1.0))) == 32


def test_configurations_when_ranks_follow_a_pattern_then_count_as_the_widest(settings):
    job = {"adapter": {"rank_pattern": {"q_proj": 12}}}
    assert {c.rank for c in planned(settings(job=job, space={"r": [2, 4]}))} == {12}


def test_configurations_when_they_are_evaluated_then_count_the_tokens_of_every_time(settings):
    """Once per epoch, every so many steps or at every rung, and at the end; nothing without evaluation data."""
    epochs, often, rungs = (
        planned(settings(space={"r": [2], "max_steps": [9], **more}, **rule))[0]
        for more, rule in (
            ({"global_batch_size": [6]}, {}),
            ({"eval_steps": [2]}, {}),
            ({}, {"early_stop": {"rule": "median", "grace": 0.25}}),
        )
    )
    spec = sweep_from_mapping(settings(), base_dir=Path())
    whole = Configurations(spec, executor_on(load_skeleton(resolve(spec.backbone))), Path())
    each = whole.data(whole.job("t", {})).eval.summary.num_tokens
    assert [c.forward_tokens for c in (epochs, often, rungs)] == [3 * each, 5 * each, 3 * each]
    command = {"command": "echo 1", "mode": "min"}
    assert planned(settings(job={"eval_data": None}, objective=command))[0].forward_tokens == 0


def test_plan_when_trials_train_experts_then_counts_what_a_plan_of_a_run_does(settings):
    plain_model("qwen3_moe", vocab_size=264, max_position_embeddings=512).save_pretrained("mixture")
    for file in Path(TINY).glob("*token*"):
        shutil.copy(file, "mixture")
    given = settings(base_model="mixture", space={"experts": ["none", "full"]}, job={"adapter": {"r": 4}})
    frozen, trained = planned(given)
    assert trained.num_parameters - frozen.num_parameters == 2 * 4 * 4 * (64 + 72)
    spec = sweep_from_mapping(given, base_dir=Path())
    (pack,) = plan_elsewhere(spec, Path(), "h200", 1).packs
    numbers = [frozen.num_parameters, trained.num_parameters]
    setup = resolve(spec.backbone, find_hardware("h200")).setup([4, 4], numbers, [AdapterSpec(experts="full")])
    memory = setup.cost(find_hardware("h200")).memory
    assert pack.gpu_bytes == pytest.approx(memory.total_bytes(128, [4, 4]), abs=2 * 18 * memory.shape.num_layers)


def test_plan_when_made_elsewhere_then_has_the_capacity_and_everything_of_the_sweep(settings):
    spec = sweep_from_mapping(settings(), base_dir=Path())
    plan = plan_elsewhere(spec, Path(), "h200", 2)
    assert not violations(plan, planned(settings()))
    assert {pack.capacity for pack in plan.packs} == {128} and plan.num_gpus == 2
    with pytest.raises(ConfigError, match="above the smaller side"):
        plan_elsewhere(sweep_from_mapping(settings(space={"r": [4096]}), base_dir=Path()), Path(), "h200", 1)


def test_plan_when_capacity_is_auto_then_it_is_that_of_the_device_and_less_where_memory_is_short(settings, monkeypatch):
    def capacity(device: str, *lengths: int) -> set[int]:
        space = {"max_length": [40, *lengths], "r": [2, 4]}
        spec = sweep_from_mapping(settings(capacity="auto", space=space), base_dir=Path())
        return {pack.capacity for pack in plan_elsewhere(spec, Path(), device, 1).packs}

    assert capacity("cpu") == {2048} and capacity("h200") == {8192}
    assert capacity("cpu", 3000, 48) == {4096}
    small = replace(DEVICES["h200"], memory_bytes=8 * 10**6)
    monkeypatch.setitem(DEVICES, "h200", small)
    assert capacity("h200") == {4096}
    monkeypatch.setitem(DEVICES, "h200", replace(small, memory_bytes=1000))
    with pytest.raises(PlanError, match="a microbatch of 2,048 rows"):
        capacity("h200")
