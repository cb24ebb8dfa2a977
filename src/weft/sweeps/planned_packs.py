"""Upcoming trials in the packs of the packing planner's plan.

The plan decides which trials begin together. It is no timetable: an ended trial leaves its seat to the next at once,
and placement, which sees the real speed of replicas, decides where.

- Where no decision depends on the order, the plan is one over all replicas, each with its stages, and also decides how
  many trials train at a time. If a trial ends before its last planned step, such as by its patience, the rest is
  planned again.
- With early stopping the plan is that of one device for all trials, so that the order, and with it which trials are
  compared, depends neither on the number of replicas nor on a resume.

The first ten steps of all trials show how long planned seconds really take. With that `Makespan` predicts the end of
the sweep, and again, from a plan of what is left, when early stopping has ended trials.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
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
from weft.plan.layout import parse_layout
from weft.plan.sweep import Configuration, SweepPlan, plan_sweep
from weft.spec import AdapterSpec
from weft.spec.load_sweep import longest_of, space_of
from weft.spec.sweep import SweepSpec
from weft.sweeps.configure import Configurations
from weft.sweeps.ledger import SweepContext
from weft.sweeps.samplers import first_points, num_planned, sampler_name
from weft.sweeps.trials_file import Trial, TrialState


class PlannedPacks:
    def __init__(
        self, context: SweepContext, trials: Iterable[Trial], begun: Sequence[Trial], *, is_free: bool
    ) -> None:
        """`trials` keep their order if planning is not possible, e.g. on an unknown device. `begun`: those that started
        before. `is_free`: True if no decision depends on the order."""
        self._context, self._is_free = context, is_free
        self._upcoming = deque(trials)
        self._begun = list(begun)
        self._configurations = self._known_of([*self._begun, *self._upcoming])
        self.widest = 0
        """Trials of the widest pack so far: so many have room on a replica, and fill its microbatches."""
        self.num_packs = 0
        self.work_s: dict[str, float] = {}
        """Planned seconds of every trial: its share of its pack's by tokens, and of all devices."""
        self._plan()

    def next(self) -> Trial | None:
        return self._upcoming.popleft() if self._upcoming else None

    def note_end(self, trial: Trial) -> None:
        """Plans the remaining trials again if one has ended sooner than planned."""
        if self._is_free and self._upcoming and trial.steps < trial.total_steps:
            self._plan()

    def left_s(self, trials: Sequence[Trial]) -> float | None:
        """Planned seconds until all is trained, in packs of its own; None if it cannot be planned."""
        steps = {trial.name: trial.total_steps - trial.steps for trial in trials if not trial.state.is_final}
        known = self._configurations
        steps |= {trial.name: known[trial.name].num_steps for trial in self._upcoming if trial.name in known}
        left = [replace(known[name], num_steps=num) for name, num in steps.items() if num and name in known]
        plan = self._found(left)
        return None if plan is None else plan.makespan_s

    def _plan(self) -> None:
        planned = self._upcoming if self._is_free else sorted([*self._begun, *self._upcoming], key=lambda t: t.number)
        plan = self._found([self._configurations[t.name] for t in planned if t.name in self._configurations])
        if plan is None:
            return
        self.widest = max(self.widest, *(len(pack.configurations) for pack in plan.packs))
        self.num_packs = self.num_packs or len(plan.packs)
        for pack in plan.packs:
            tokens = {name: self._configurations[name].num_tokens for name in pack.configurations}
            all_s = pack.seconds * len(pack.gpus) / plan.num_gpus
            shares = {name: all_s * num / sum(tokens.values()) for name, num in tokens.items()}
            self.work_s = {**shares, **self.work_s}
        number = {name: i for i, pack in enumerate(plan.packs) for name in pack.configurations}
        # Trials that cannot be planned cannot be trained either, and fail in their turn.
        self._upcoming = deque(sorted(self._upcoming, key=lambda trial: number.get(trial.name, len(plan.packs))))

    def _found(self, chosen: Sequence[Configuration]) -> SweepPlan | None:
        spec, engine = self._context.spec, self._context.engine
        facts = engine.executor.facts
        device = "cpu" if facts.device_kind == "cpu" else str(facts.environment["device"])
        assert isinstance(spec.capacity, int), "it is a number once replicas are there"
        if not chosen:
            return None
        # One engine over several replicas trains every trial on all of them.
        replicas = parse_layout(engine.layout).replicas[: engine.num_replicas]
        try:
            model, adapters = self._context.configurations.model, self._context.configurations.adapters
            return plan_sweep(
                chosen,
                ModelShape.from_config(facts.config, spec.base_model),
                device,
                quantize=spec.quantize,
                recompute=spec.recompute,
                capacity=spec.capacity,
                plain_row_bytes=None if model is None else model.plain_row_bytes(adapters),
                in_stages=True,
                groups=[replica.stages for replica in replicas] if self._is_free else [1],
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


MEASURED_STEPS = 10
"""Steps of every trial that trains, from which the pace is known."""
WORTH_A_PLAN = 8
"""The end is predicted again once one in so many trials has been stopped."""


class Makespan:
    def __init__(self, packs: PlannedPacks, predictions: list[tuple[float, float]]) -> None:
        """`predictions`: receives each, as the moment and the predicted end, in seconds of the sweep."""
        self._packs, self._predictions = packs, predictions
        self._num_steps = 0
        self._first: tuple[float, float] | None = None
        """After the first step of all trials: the moment, and the planned seconds done by then."""
        self._pace: float | None = None
        """Real seconds of a planned one."""
        self._is_known = False
        self._num_stopped = 0

    def note(self, trials: Sequence[Trial], now_s: float, *, has_step: bool) -> None:
        """Records an event of the sweep, which may be the step of a trial."""
        if not self._packs.work_s:
            return
        num_training = sum(trial.state is TrialState.TRAINING for trial in trials)
        self._num_steps += has_step
        if has_step and not self._is_known and self._num_steps > num_training:
            self._measure(trials, now_s)
            if self._num_steps > (1 + MEASURED_STEPS) * num_training:
                self._is_known = True
                self._predict(trials, now_s)
        num_stopped = sum(trial.state is TrialState.STOPPED for trial in trials)
        if num_stopped - self._num_stopped > num_training // WORTH_A_PLAN:
            self._num_stopped = num_stopped
            self._predict(trials, now_s)

    def _measure(self, trials: Sequence[Trial], now_s: float) -> None:
        work_s = self._packs.work_s
        done_s = sum(work_s.get(t.name, 0.0) * t.steps / max(t.total_steps, 1) for t in trials)
        if self._first is None:
            self._first = now_s, done_s
        elif done_s > self._first[1]:
            self._pace = (now_s - self._first[0]) / (done_s - self._first[1])

    def _predict(self, trials: Sequence[Trial], now_s: float) -> None:
        left_s = self._packs.left_s(trials)
        if self._pace is not None and left_s is not None:
            self._predictions.append((round(now_s, 3), round(now_s + self._pace * left_s, 3)))


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
    chosen, hardware = sampled(spec, configurations), find_hardware(device)
    plain = resolve(spec.backbone, hardware).plain_row_bytes(configurations.adapters)
    plan = partial(plan_sweep, chosen, shape, device, gpus, quantize=spec.quantize, recompute=spec.recompute)
    plan = partial(plan, plain_row_bytes=plain)
    *larger, least = capacities(spec.capacity, hardware.name, longest_of(spec))
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
        num_parameters=None if configurations.model is None else configurations.model.num_parameters(job.adapter),
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
