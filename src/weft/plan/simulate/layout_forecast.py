"""The forecast of a run in any layout, by the planner that trains it, with a simulation of every stage.

On several replicas, jobs are at home on one of them, those with order-independent sums on all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from weft.plan.choose_layout import split_model
from weft.plan.cost.analytic import AnalyticCost
from weft.plan.cost.divided import ShardCost
from weft.plan.cost.profile import ProfiledCost
from weft.plan.layout import Layout, copies
from weft.plan.level import choose_homes
from weft.plan.pack import planner_named
from weft.plan.planner import HomeLoad
from weft.plan.program import Forward, Program
from weft.plan.simulate.choose import FastestSpread, pipeline_planner
from weft.plan.simulate.forecast import (
    ALL,
    ROW_TILE,
    Forecast,
    JobOutline,
    forecast,
    forward_s,
    groups_of,
    in_flight_of,
    most_held,
    unusual_bytes,
)
from weft.plan.simulate.interpret import simulate
from weft.plan.simulate.timeline import Timeline
from weft.plan.spread import SpreadPlanner
from weft.plan.types import Limits


def forecast_layout(
    jobs: Sequence[JobOutline],
    capacity: int,
    cost: AnalyticCost,
    layout: Layout,
    *,
    planner: str = "auto",
    in_pairs: bool = False,
    measured: ProfiledCost | None = None,
) -> Forecast:
    """The forecast of a run in a layout; `cost` is that of the backbone on one device. `planner`: the name in the run's
    settings. `in_pairs`: allows microbatches side by side. `measured`: replaces the cost model, on one device or one
    replica in stages."""
    sizes = layout.replica_sizes
    splits = {n: split_model(cost.shape, n) for n in sizes}
    kinds = [(own.stages, own.tensor) for own in layout.replicas for _ in range(own.shards)]
    costs = [replace(cost, num_stages=n, tensor_parallel=tensor, split=splits[n]) for n, tensor in kinds]
    if len(sizes) > 1:
        shards = layout.shards if max(layout.shards) > 1 else ()
        return forecast_replicas(jobs, capacity, costs, shards=shards, planner=planner)
    if measured is not None:
        measured = replace(measured, num_stages=sizes[0], split=splits[sizes[0]])
    if sizes == (1,) and not in_pairs:
        return forecast(jobs, capacity, costs[0], planner_named(planner), measured)
    chosen = pipeline_planner(planner, costs[0], in_pairs=in_pairs, measured=measured)
    return forecast(jobs, capacity, costs[0], chosen, measured)


def forecast_replicas(
    jobs: Sequence[JobOutline],
    capacity: int,
    costs: Sequence[AnalyticCost],
    *,
    shards: Sequence[int] = (),
    planner: str = "auto",
) -> Forecast:
    """The forecast of a run on replicas with these costs. `planner`: the name in the run's settings. `shards`: how many
    replicas share each copy of the frozen weights; `costs` are those of devices that hold all weights."""
    sizes = tuple(cost.num_stages for cost in costs)
    times = [
        ShardCost(costs[replica], len(own)) if len(own) > 1 else costs[replica]
        for own in copies(len(costs), shards)
        for replica in own
    ]
    degrees = tuple(cost.tensor_parallel for cost in costs)
    spread = SpreadPlanner(sizes, tuple(times), shards=tuple(shards), tensor=degrees)
    at_home = sorted((job for job in jobs if not job.is_any_order), key=lambda job: job.queue.job)
    loads = {job.queue.job: HomeLoad(job.num_tokens / job.num_steps, _longest(job)) for job in at_home}
    homes = choose_homes(spread.home_seconds(loads, capacity))
    queues = [replace(job.queue, home=homes.get(job.queue.job)) for job in jobs]
    chosen = FastestSpread(spread, costs[0].row_tile) if max(sizes) > 1 and planner != "greedy" else spread
    in_flight = [
        number
        for k, (cost, own) in enumerate(zip(costs, times, strict=True))
        for number in in_flight_of(_jobs_on(k, jobs, homes), capacity, cost, own.memory)
    ]
    program = chosen(queues, Limits(capacity, ALL, costs[0].row_tile, tuple(in_flight)))
    timeline = simulate(program, times)
    microbatches = [m for m in program.microbatches if m.segments]
    needs = _stage_needs(jobs, homes, program, timeline, costs, times)
    return Forecast(
        jobs=tuple(jobs),
        groups=groups_of([queue.job for queue in queues], microbatches),
        device=costs[0].hardware.name,
        num_stages=program.num_stages,
        stage_layers=tuple(cost.memory.layers(stage) for cost in costs for stage in range(cost.num_stages)),
        capacity=capacity,
        schedule=f"{len(sizes)} shards in step" if len(shards) == 1 else f"{len(shards) or len(sizes)} replicas",
        program=program,
        timeline=timeline,
        # A job is evaluated on its home replica, one that all train on the first.
        eval_s=max(
            sum(forward_s(job, capacity, times[k], size) for job in jobs if homes.get(job.queue.job, 0) == k)
            for k, size in enumerate(sizes)
        ),
        stage_bytes=tuple(num_bytes for num_bytes, _ in needs),
        device_bytes=costs[0].hardware.memory_bytes,
        largest_capacity=min(most for _, most in needs),
        keeps_order=not any(job.is_any_order for job in jobs),
        tensor_parallel=costs[0].tensor_parallel,
    )


def _longest(job: JobOutline) -> int:
    return max(length for batch in job.queue.batches for length in batch.lengths)


def _jobs_on(replica: int, jobs: Sequence[JobOutline], homes: Mapping[str, int]) -> list[JobOutline]:
    return [job for job in jobs if homes.get(job.queue.job, replica) == replica]


def _stage_needs(
    jobs: Sequence[JobOutline],
    homes: Mapping[str, int],
    program: Program,
    timeline: Timeline,
    costs: Sequence[AnalyticCost],
    times: Sequence[AnalyticCost | ShardCost],
) -> list[tuple[int, int]]:
    """The peak memory of every stage, and the largest microbatch that fits there."""
    found = []
    for replica, stages in enumerate(program.replicas):
        cost, memory = costs[replica], times[replica].memory
        there = _jobs_on(replica, jobs, homes)
        ranks = [job.cost_rank for job in there]
        run = [program.microbatches[i.microbatch] for i in program.stages[stages.start] if isinstance(i, Forward)]
        rows = max((cost.rows([s.length for s in m.segments]) for m in run), default=0)
        for stage, index in enumerate(stages):
            held, more = most_held(timeline, index), unusual_bytes(there, cost, stage)
            needed = memory.total_bytes(rows, ranks, stage=stage, num_held=held) + more
            room = cost.hardware.memory_bytes - more
            found.append((needed, memory.most_rows(room, ranks, ROW_TILE, stage, held)))
    return found
