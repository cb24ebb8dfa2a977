"""What stages would do in a whole run: a planner is asked for programs as the engine asks it, and all are simulated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.engine.jobs.progress import PLANNED_BATCHES
from weft.engine.staged_run import last_of
from weft.plan.check import violations
from weft.plan.cost.types import CostModel
from weft.plan.pipeline.append import DealtStream, joined_all, open_pipe
from weft.plan.pipeline.eager import Pipe
from weft.plan.program import Program, Step
from weft.plan.simulate.choose import FastestPipeline
from weft.plan.simulate.choose_spread import FastestSpread
from weft.plan.simulate.interpret import simulate
from weft.plan.spread.planner import max_lead
from weft.plan.types import JobQueue, Limits


@dataclass(frozen=True)
class Executed:
    """Programs one after another."""

    makespan_s: float
    busy_s: float
    """Of all stages."""
    num_stages: int
    num_programs: int

    @property
    def bubble_ratio(self) -> float:
        """Share of the stages' time in which nothing is computed."""
        return 1 - self.busy_s / (self.num_stages * self.makespan_s)


def execute(
    planner: FastestPipeline | FastestSpread,
    jobs: Sequence[JobQueue],
    limits: Limits,
    cost: CostModel,
    every: int | None = None,
    *,
    drains: bool = False,
) -> Executed:
    """Plans and simulates until all jobs have ended; with `every`, each job stops after so many of its steps.

    A program is appended to the one before, unless it `drains`: then something was due that needs all stages. `cost`:
    of every replica.
    """
    programs = _programs(planner, jobs, limits, every, drains=drains)
    run = programs
    pipes = _pipes(planner, limits.capacity)
    costs = [cost] * len(pipes)
    if not drains:
        run = [joined_all([DealtStream.of(program) for program in programs], pipes, [(cost, None) for cost in costs])]
        assert not violations(run[0], jobs, limits), "programs that are appended are one that is valid"
    timelines = [simulate(program, costs) for program in run]
    stages = range(sum(pipe.num_stages for pipe in pipes))
    return Executed(
        sum(timeline.makespan_s for timeline in timelines),
        sum(timeline.busy_s(stage) for timeline in timelines for stage in stages),
        len(stages),
        len(programs),
    )


def _pipes(planner: FastestPipeline | FastestSpread, capacity: int) -> list[Pipe]:
    """The replicas, as the engine appends to them."""
    if isinstance(planner, FastestPipeline):
        return [open_pipe(planner.num_stages, planner.memory_bytes(capacity))]
    return [open_pipe(size, max_lead=max_lead(size)) for size in planner.quick.replica_sizes]


def _programs(
    planner: FastestPipeline | FastestSpread,
    jobs: Sequence[JobQueue],
    limits: Limits,
    every: int | None,
    *,
    drains: bool,
) -> list[Program]:
    """All that the engine would ask for, one after another."""
    rest, found = list(jobs), list[Program]()
    while rest:
        queues = [_shown(queue, every) for queue in rest]
        if found and not drains:
            behind = last_of(found[-1])
            if isinstance(planner, FastestPipeline):
                planner = replace(planner, behind=behind[0])
            else:
                planner = replace(planner, behind=behind)
        program = planner(queues, limits)
        assert not violations(program, queues, limits), "a planner's program is valid"
        found.append(program)
        steps = {i for own in program.stages for i in own if isinstance(i, Step)}
        done = Counter(step.job for step in steps)
        rest = [replace(queue, batches=queue.batches[done[queue.job] :]) for queue in rest]
        rest = [queue for queue in rest if queue.batches]
    return found


def _shown(queue: JobQueue, every: int | None) -> JobQueue:
    """What the engine shows of a queue: some global batches, and none beyond the step at which something is due."""
    size = PLANNED_BATCHES
    if every is not None:
        size = min(size, every - queue.batches[0].step % every)
    return replace(queue, batches=queue.batches[:size], is_all=queue.is_all and size >= len(queue.batches))
