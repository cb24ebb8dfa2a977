"""Opens engines on replicas in stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

from weft.engine.engine import Engine
from weft.engine.execute.memory import COMPILING, ExpectedJobs
from weft.engine.execute.protocol import Executor
from weft.model.resolve import ResolvedModel
from weft.parallel.stages.load_stages import (
    StageLayout,
    layout_notes,
    load_stages,
    pair_notes,
    stage_cost,
    why_no_pairs,
)
from weft.plan.cost.rows import choose_capacity
from weft.plan.pipeline.planner import PipelinePlanner
from weft.plan.program import Planner
from weft.plan.simulate.choose import pipeline_planner
from weft.plan.simulate.choose_spread import FastestSpread
from weft.plan.spread.planner import SpreadPlanner
from weft.spec import JobSpec, RunSpec
from weft.wall_clock import Activity, WallClock

RunT = TypeVar("RunT", bound=RunSpec)


def load_staged(
    spec: RunT, model: ResolvedModel, jobs: Sequence[JobSpec], layout: StageLayout, wall: WallClock | None = None
) -> tuple[RunT, Engine, tuple[str, ...]]:
    """The engine of a run on one or more replicas of several stages, each in a process of this machine.

    Like `load_engine`.
    """
    wall = wall or WallClock()
    executor = load_stages(model, layout, spec.memory_limit, ExpectedJobs.of(jobs, spec.max_jobs))
    planner = stage_planner(model, spec.planner, layout, _row_tile(spec, jobs, executor))
    engine = _engine(spec, jobs, executor, planner, wall)
    notes = (
        *layout_notes(spec, model, layout),
        *pair_notes(spec, model, layout),
        *((COMPILING,) if executor.is_compiling else ()),
    )
    return dataclasses.replace(spec, capacity=engine.limits.capacity), engine, notes


def _row_tile(spec: RunSpec, jobs: Sequence[JobSpec], executor: Executor) -> int:
    """Rows that every frozen product of the run is computed in."""
    longest = max(job.max_length for job in jobs)
    return executor.row_tile(choose_capacity(spec.capacity, executor.facts.device_kind, longest))


def _engine(spec: RunSpec, jobs: Sequence[JobSpec], executor: Executor, planner: Planner, wall: WallClock) -> Engine:
    wall.add_start(Activity.LOADING)
    return Engine(
        executor,
        capacity=spec.capacity,
        longest=max(job.max_length for job in jobs),
        planner=planner,
        max_jobs=spec.max_jobs,
        tenant_weights=spec.tenant_weights,
        wall=wall,
    )


def stage_planner(model: ResolvedModel, name: str, layout: StageLayout, row_tile: int) -> Planner:
    """The planner of a run whose `planner` is this name, for replicas that are divided."""
    sizes = layout.replica_sizes
    if layout.schedule is not None:
        return PipelinePlanner(layout.schedule, *sizes)
    costs = {size: stage_cost(model, size, row_tile, layout.tensor) for size in sizes}
    if len(sizes) == 1:
        in_pairs = layout.tensor > 1 and why_no_pairs(model, name, layout) is None
        return pipeline_planner(name, costs[sizes[0]], in_pairs=in_pairs)
    planner = SpreadPlanner(sizes, tuple(costs[size] for size in sizes), layout.planned, layout.shards)
    return planner if max(sizes) == 1 or name == "greedy" else FastestSpread(planner, row_tile)
