"""Upcoming trials in the packs of the packing planner's plan over all replicas.

The plan decides which trials begin together and how many train at a time. It is no timetable: an ended trial leaves its
seat to the next at once, and placement, which sees the real speed of replicas, decides where. If a trial ends before
its last planned step, such as by its patience, the rest is planned again.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from weft.adapters.method import Attachment
from weft.adapters.targets import choose_modules
from weft.engine.execute.local import executor_on
from weft.engine.execute.protocol import ReplicaFacts
from weft.errors import ConfigError, PlanError, WeftError
from weft.kernels.device import default_device, device_name
from weft.methods.registry import cost_ranks, method_of
from weft.model.load import load_skeleton
from weft.model.resolve import resolve
from weft.plan.cost.hardware import find_hardware
from weft.plan.cost.shape import ALL_LINEAR, ModelShape, capacities
from weft.plan.sweep import Configuration, SweepPlan, plan_sweep
from weft.spec import AdapterSpec
from weft.spec.load_sweep import longest_of, space_of
from weft.spec.sweep import SweepSpec
from weft.sweeps.configure import Configurations
from weft.sweeps.ledger import SweepContext
from weft.sweeps.samplers import first_points, num_planned, sampler_name
from weft.sweeps.trials_file import Trial


class PlannedPacks:
    def __init__(self, context: SweepContext, trials: Iterable[Trial]) -> None:
        """`trials` keep their order if planning is not possible, e.g. on an unknown device."""
        self._context = context
        self._upcoming = deque(trials)
        self._configurations = self._known_of(self._upcoming)
        self.widest = 0
        """Trials of the widest pack so far: so many have room on a replica, and fill its microbatches."""
        self._plan()

    def next(self) -> Trial | None:
        return self._upcoming.popleft() if self._upcoming else None

    def note_end(self, trial: Trial) -> None:
        """Plans the remaining trials again if one has ended sooner than planned."""
        if self._upcoming and trial.steps < trial.total_steps:
            self._plan()

    def _plan(self) -> None:
        plan = self._found()
        if plan is None:
            return
        self.widest = max(self.widest, *(len(pack.configurations) for pack in plan.packs))
        number = {name: i for i, pack in enumerate(plan.packs) for name in pack.configurations}
        # Trials that cannot be planned cannot be trained either, and fail in their turn.
        self._upcoming = deque(sorted(self._upcoming, key=lambda trial: number.get(trial.name, len(plan.packs))))

    def _found(self) -> SweepPlan | None:
        spec, engine = self._context.spec, self._context.engine
        chosen = [self._configurations[t.name] for t in self._upcoming if t.name in self._configurations]
        facts = engine.executor.facts
        device = "cpu" if facts.device_kind == "cpu" else str(facts.environment["device"])
        assert isinstance(spec.capacity, int), "it is a number once replicas are there"
        if not chosen:
            return None
        try:
            return plan_sweep(
                chosen,
                ModelShape.from_config(facts.config, spec.base_model),
                device,
                engine.num_replicas,
                quantize=spec.quantize,
                recompute=spec.recompute,
                capacity=spec.capacity,
                max_degree=1,
            )
        except WeftError:
            return None

    def _known_of(self, trials: Iterable[Trial]) -> dict[str, Configuration]:
        found = {}
        for trial in trials:
            try:
                found[trial.name] = configuration_of(self._context.configurations, trial.name, trial.params)
            except WeftError:
                continue
        return found


MOST_PLANNED = 1000
"""Most configurations of a plan; larger sweeps are extrapolated."""
WITHOUT_A_COUNT = 32
"""Configurations planned where only time ends a sweep."""


def plan_elsewhere(spec: SweepSpec, base_dir: Path, device: str, gpus: int) -> SweepPlan:
    """The plan for any hardware; reads the model's files but not its weights, and all data."""
    space = space_of(spec)
    sampler_name(spec, space)
    model = resolve(spec.backbone, find_hardware(device))
    configurations = Configurations(spec, executor_on(load_skeleton(model)), base_dir)
    configurations.check(space, spec.trials)
    return plan_configurations(spec, configurations, device, gpus)


def plan_configurations(spec: SweepSpec, configurations: Configurations, device: str, gpus: int = 1) -> SweepPlan:
    """The plan of a sweep with its own settings; `auto` capacity is reduced until it fits."""
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
    """The adapted linears in the planner's terms; all if the model or the method has others."""
    if method_of(adapter).attachment is not Attachment.LINEAR or adapter.experts != "none":
        return ALL_LINEAR
    leaves = {path.rpartition(".")[2] for path in choose_modules(adapter, Attachment.LINEAR, list(facts.modules))}
    known = ModelShape.from_config(facts.config).linears
    names = tuple(name for name in known if name in leaves)
    return names if names and len(names) == len(leaves) < len(known) else ALL_LINEAR


def device_here() -> str:
    return device_name(default_device())
