"""Plans count the memory that admission counts, in every layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from staged_models import staged_executor
from tensor_models import tensor_executor
from test_sharded import shared_by
from tiny_models import job_spec, random_backbone, random_data

from weft.engine.engine import Engine
from weft.engine.execute.local import LocalExecutor
from weft.engine.execute.protocol import Executor
from weft.parallel.stages.staged import StagedExecutor
from weft.plan.choose_layout import LayoutJob, price_layout
from weft.plan.cost.analytic import BackboneSetup
from weft.plan.cost.divided import ShardCost
from weft.plan.cost.hardware import find_hardware
from weft.plan.cost.memory import job_state
from weft.plan.cost.shape import ModelShape
from weft.plan.layout import parse_layout
from weft.plan.simulate.forecast import JobOutline, most_held
from weft.plan.simulate.layout_forecast import forecast_layout
from weft.plan.types import Batch, JobQueue

FUSED = {"kernels": "fused"}
LAYOUTS: dict[str, Callable[[], Executor]] = {
    "stages:1": lambda: LocalExecutor(random_backbone("llama", num_hidden_layers=4, **FUSED)),
    "stages:2": lambda: staged_executor("llama", (2, 2), **FUSED),
    "shards:2": lambda: shared_by((2, (4,)), **FUSED)[0].executor,
    "spread:2": lambda: staged_executor("llama", (4,), (4,), **FUSED),
    "tensor:2": lambda: tensor_executor("llama", 2, (4,), **FUSED),
    "tensor:2,stages:2": lambda: tensor_executor("llama", 2, (2, 2), **FUSED),
}
JOBS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "lean": {"optim": "sgd", "momentum": 0.9, "weight_decay": 0.0},
    "average": {"ema_decay": 0.9},
}
CAPACITY = 256


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_when_planned_then_each_device_has_the_bytes_that_admission_counts(layout):
    """By `weft plan`, and by the prediction of a dry run: jobs and microbatches to the byte."""
    executor = LAYOUTS[layout]()
    engine, wanted = Engine(executor, capacity=CAPACITY), parse_layout(layout)
    shape = ModelShape.from_config(dict(executor.facts.config))
    cost = BackboneSetup(shape, (4,)).cost(find_hardware("cpu"))
    (replica, *_), devices = wanted.replicas, range(wanted.replica_sizes[0])
    part = replace(cost, num_stages=replica.stages, tensor_parallel=replica.tensor)
    weights = [ShardCost(part, replica.shards).memory.weight_bytes(device) for device in devices]
    found = executor.stages.call_all("facts") if isinstance(executor, StagedExecutor) else [executor.facts]
    assert weights == pytest.approx([found[device].backbone_bytes for device in devices], rel=0.02)
    for name, settings in JOBS.items():
        spec = job_spec(name, adapter={"r": 4, "target_modules": "all-linear"}, **settings)
        engine.submit(spec, random_data(1, num_samples=3))
        jobs = executor.account.shares({name: engine.bytes_of(engine.jobs[name])})
        if not any(jobs[device] for device in devices):
            # At home on the second replica.
            jobs = jobs[len(devices) :]
        microbatches = [each.num_bytes for each in executor.account.microbatches(CAPACITY, [spec.adapter])]
        queue = JobQueue(name, tuple(Batch(step, 0, (CAPACITY,) * 4) for step in range(2)), True)
        outline = JobOutline(queue, 2, 8 * CAPACITY, 4, state=job_state(spec))
        planned = forecast_layout([outline], CAPACITY, cost, wanted)
        option = price_layout(cost, [LayoutJob(4 * CAPACITY, 4, state=job_state(spec))], CAPACITY, wanted)
        held = [most_held(planned.timeline, device) for device in devices]
        for device in devices:
            there = jobs[device] + held[device] * microbatches[device]
            assert planned.stage_bytes[device] == weights[device] + there, (name, device)
        most = (weights[d] + jobs[d] + (len(devices) - d) * microbatches[d] for d in devices)
        assert option.device_bytes == max(most), name
