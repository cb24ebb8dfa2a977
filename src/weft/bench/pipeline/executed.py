"""What stages would do in a whole run: a planner is asked for programs as the engine asks it, and all are simulated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.cost.types import CostModel
from weft.engine.jobs.progress import PLANNED_BATCHES
from weft.plan.check import violations
from weft.plan.program import Planner, Step
from weft.plan.types import JobQueue, Limits
from weft.simulate.interpret import simulate


@dataclass(frozen=True)
class Executed:
    """Programs one after another, each drained before the next begins."""

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
    planner: Planner, jobs: Sequence[JobQueue], limits: Limits, cost: CostModel, every: int | None = None
) -> Executed:
    """Plans and simulates until all jobs have ended; with `every`, each job stops after so many of its steps."""
    rest, makespan_s, busy_s, num_programs, num_stages = list(jobs), 0.0, 0.0, 0, 1
    while rest:
        queues = [_shown(queue, every) for queue in rest]
        program = planner(queues, limits)
        assert not violations(program, queues, limits), "a planner's program is valid"
        timeline = simulate(program, cost)
        num_stages, num_programs = program.num_stages, num_programs + 1
        makespan_s += timeline.makespan_s
        busy_s += sum(timeline.busy_s(stage) for stage in range(num_stages))
        done = Counter(i.job for i in program.stages[0] if isinstance(i, Step))
        rest = [replace(queue, batches=queue.batches[done[queue.job] :]) for queue in rest]
        rest = [queue for queue in rest if queue.batches]
    return Executed(makespan_s, busy_s, num_stages, num_programs)


def _shown(queue: JobQueue, every: int | None) -> JobQueue:
    """What the engine shows of a queue: some global batches, and none beyond the step at which something is due."""
    size = PLANNED_BATCHES
    if every is not None:
        size = min(size, every - queue.batches[0].step % every)
    return replace(queue, batches=queue.batches[:size], is_all=queue.is_all and size >= len(queue.batches))
