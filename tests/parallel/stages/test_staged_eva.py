"""A start by EVA has the bits of one device under every layout whose layers are whole."""

from __future__ import annotations

from typing import Any

import pytest
from covering import slow
from staged_models import staged_executor
from test_sharded import shared_by
from test_spread import engine_of
from tiny_models import Job, assert_same_bits, finish, job_spec, random_backbone, random_data, small_job, submit, train

from weft.engine.engine import Engine
from weft.engine.execute import eva as execute_eva
from weft.engine.execute.eva import LinearInputs
from weft.plan.pipeline.build import PipelinePlanner, Schedule

LAYERS = 3
EVA: dict[str, Any] = {"r": 4, "init_lora_weights": "eva", "rank_pattern": {"v_proj": 6}}


def jobs() -> list[Job]:
    """One with modules everywhere, one that some stages have nothing of, one of free sums, and a neighbour."""
    own = [
        ("all", EVA, {}),
        ("middle", {**EVA, "layers_to_transform": (1,)}, {}),
        ("free", EVA, {"gradient_sum": "any_order"}),
    ]
    return [
        *(
            (job_spec(name, seed=3, adapter=adapter, max_steps=2, **settings), random_data(seed, num_samples=12))
            for seed, (name, adapter, settings) in enumerate(own)
        ),
        small_job("other", max_steps=2),
    ]


def staged(sizes: tuple[int, ...], **options: Any) -> Engine:
    planner = PipelinePlanner(Schedule.EAGER, len(sizes))
    return Engine(staged_executor("llama", sizes, **options), capacity=48, planner=planner)


@pytest.mark.parametrize("layout", [slow("stages"), "fused", "replicas", slow("shards"), "shards of stages"])
def test_start_when_the_model_is_divided_then_has_the_bits_of_one_device(layout, monkeypatch):
    """Of several passes, after which modules know enough at different moments."""
    monkeypatch.setattr(execute_eva, "PASS_TOKENS", 40)
    kernels = "fused" if layout == "fused" else "reference"
    expected = train(random_backbone("llama", num_hidden_layers=LAYERS, kernels=kernels), jobs(), capacity=48)
    if layout in ("stages", "fused"):
        engine = staged((1, 1, 1), kernels=kernels)
    else:
        copies = [(2, (1, 2)), (1, (3,))] if layout == "shards of stages" else [(2, (3,))]
        engine = engine_of((3,), (1, 2)) if layout == "replicas" else shared_by(*copies)[0]
    submit(engine, *jobs())
    for name, outcome in finish(engine).items():
        assert_same_bits(outcome, expected[name])


def test_passes_when_all_stages_know_enough_then_no_more_are_run(monkeypatch):
    monkeypatch.setattr(execute_eva, "PASS_TOKENS", 40)
    num_run, run = [], LinearInputs.run
    monkeypatch.setattr(LinearInputs, "run", lambda *given: num_run.append(1) or run(*given))
    found = []
    for engine in (Engine(random_backbone("llama", num_hidden_layers=LAYERS), capacity=48), staged((1, 2))):
        num_run.clear()
        easy = {"r": 1, "init_lora_weights": "eva", "eva_config": {"tau": 0.1}}
        engine.submit(job_spec("job", adapter=easy), random_data(0, num_samples=80))
        engine.executor.seat("job")
        found.append(len(num_run))
    assert found[1] == 2 * found[0] and 1 < found[0] < 16, found
