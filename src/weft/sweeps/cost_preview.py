"""What a sweep will cost, planned before anything is trained: packs, time, memory, and how far from the best possible.

The configurations are those the sampler gives while nothing is known; from then on samplers that learn may choose
others. Times are a model's, evaluations and references included; early stopping, and answers or commands that an
objective asks for, are left out.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from weft.adapters.method import Attachment
from weft.adapters.targets import choose_modules
from weft.engine.execute.local import executor_on
from weft.engine.execute.protocol import ReplicaFacts
from weft.errors import ConfigError, PlanError
from weft.kernels.device import default_device, device_name
from weft.methods.registry import cost_ranks, method_of
from weft.model.load import load_skeleton
from weft.model.resolve import resolve
from weft.plan.cost.hardware import find_hardware
from weft.plan.cost.rows import capacities
from weft.plan.cost.shape import ALL_LINEAR, ModelShape
from weft.plan.sweep import Configuration, SweepPlan, plan_sweep
from weft.spec import AdapterSpec
from weft.spec.load_sweep import longest_of, space_of
from weft.spec.sweep import SweepSpec
from weft.sweeps.configure import Configurations
from weft.sweeps.search.samplers import first_points, num_planned, sampler_name

MOST_PLANNED = 1000
"""Configurations of a plan; larger sweeps go on likewise."""
WITHOUT_A_COUNT = 32
"""Configurations that are planned where only time ends a sweep."""


def plan_elsewhere(spec: SweepSpec, base_dir: Path, device: str, gpus: int) -> SweepPlan:
    """The plan for hardware that need not be here: reads the model's files but not its weights, and all of the data."""
    space = space_of(spec)
    sampler_name(spec, space)
    model = resolve(spec.backbone, find_hardware(device))
    configurations = Configurations(spec, executor_on(load_skeleton(model)), base_dir)
    configurations.check(space, spec.trials)
    return plan_configurations(spec, configurations, device, gpus)


def plan_configurations(spec: SweepSpec, configurations: Configurations, device: str, gpus: int = 1) -> SweepPlan:
    """The plan of a sweep with its own capacity, which may be that of the device, recompute and quantize."""
    shape = ModelShape.from_config(configurations.executor.facts.config, spec.base_model)
    chosen = sampled(spec, configurations)
    plan = partial(plan_sweep, chosen, shape, device, gpus, quantize=spec.quantize, recompute=spec.recompute)
    *larger, least = capacities(spec.capacity, find_hardware(device).name, longest_of(spec))
    for capacity in larger:
        with contextlib.suppress(PlanError):
            return plan(capacity=capacity)
    return plan(capacity=least)


def sampled(spec: SweepSpec, configurations: Configurations) -> list[Configuration]:
    """The first configurations of a sweep, as many as its budget allows."""
    count = num_planned(spec, space_of(spec))
    if count is None:
        count = MOST_PLANNED if spec.max_tokens is not None else WITHOUT_A_COUNT
    found: list[Configuration] = []
    num_tokens = 0
    for name, params in itertools.islice(first_points(spec), min(count, MOST_PLANNED)):
        if num_tokens >= (spec.max_tokens or num_tokens + 1):
            break
        found.append(configuration_of(configurations, name, params))
        num_tokens += found[-1].num_tokens
    if not found:
        raise ConfigError("the sampler found no point to try.", where="space")
    return found


def configuration_of(configurations: Configurations, name: str, params: Mapping[str, Any]) -> Configuration:
    """What a planner has to know of one trial."""
    job = configurations.job(name, params)
    summary = configurations.data(job).train.summary
    return Configuration(
        name=name,
        rank=cost_ranks(job.adapter).widest,
        batch_size=job.batch_size,
        num_steps=configurations.num_steps(job),
        sample_tokens=max(1, round(summary.mean_length)),
        longest_tokens=summary.max_length,
        targets=_targets(job.adapter, configurations.executor.facts),
        forward_tokens=configurations.forward_tokens(job),
    )


def _targets(adapter: AdapterSpec, facts: ReplicaFacts) -> str | tuple[str, ...]:
    """The adapted linears in the planner's words; all where a model has other words, or the method other places."""
    if method_of(adapter).attachment is not Attachment.LINEAR:
        return ALL_LINEAR
    leaves = {path.rpartition(".")[2] for path in choose_modules(adapter, Attachment.LINEAR, list(facts.modules))}
    known = ModelShape.from_config(facts.config).linears
    names = tuple(name for name in known if name in leaves)
    return names if names and len(names) == len(leaves) < len(known) else ALL_LINEAR


def device_here() -> str:
    """This machine's device, as its driver calls it."""
    return device_name(default_device())
