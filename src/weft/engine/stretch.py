"""One program under way. While a GPU runs a microbatch, the host makes ready what follows.

That is the next microbatch of the program or, during the last one, the next program. Both are exact: packing a
microbatch changes no job, so one that is not needed after all is just dropped; a program made ahead is used only for
the very queues it was made for, and planners are deterministic, so nobody can tell.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from weft.backbone.backbone import Backbone
from weft.backbone.packed import PackedBatch
from weft.engine.events import Event, MicrobatchDone, StepDone
from weft.engine.live_job import LiveJob, take_steps
from weft.engine.step import prepare, run_microbatch
from weft.engine.timeline import Timeline
from weft.plan.check import violations
from weft.plan.types import ForwardBackward, Instruction, JobQueue, Limits, Microbatch, Planner, Program, Step


class Plans:
    """Programs of one planner, each checked before it is used."""

    def __init__(self, planner: Planner, timeline: Timeline) -> None:
        self._planner = planner
        self._timeline = timeline
        self._ahead: tuple[list[JobQueue], Limits, Program] | None = None

    def program(self, queues: list[JobQueue], limits: Limits) -> Program:
        """The program for these queues; at once if it was foreseen."""
        ahead, self._ahead = self._ahead, None
        return ahead[2] if ahead is not None and ahead[:2] == (queues, limits) else self._make(queues, limits)

    def foresee(self, queues: list[JobQueue], limits: Limits) -> None:
        """Plans for queues that are likely to come next."""
        self._ahead = (queues, limits, self._make(queues, limits)) if queues else None

    def _make(self, queues: list[JobQueue], limits: Limits) -> Program:
        with self._timeline.span("plan"):
            program = self._planner(queues, limits)
            problems = violations(program, queues, limits)
        assert program.instructions and not problems, problems
        return program


class Stretch:
    """Runs one program: microbatches one by one, steps that follow each other together."""

    def __init__(
        self,
        backbone: Backbone,
        running: Sequence[LiveJob],
        plans: Plans,
        limits: Limits,
        row_tile: int,
        timeline: Timeline,
    ) -> None:
        self._backbone = backbone
        self._jobs = {job.spec.name: job for job in running}
        self._plans = plans
        self._limits = limits
        self._row_tile = row_tile
        self._timeline = timeline
        self._rest: Sequence[Instruction] = plans.program([job.queue() for job in running], limits).instructions
        self._ready: PackedBatch | None = None

    def next_jobs(self) -> list[str]:
        """The jobs that the next call of `advance` is about; none at the end."""
        return [step.job for step in self._steps()] or list(self._shares())

    def advance(self) -> list[Event]:
        """Runs the next microbatch, or takes all the steps that are due; says what has been done."""
        steps = self._steps()
        done: list[Event] = [*self._take(steps)] if steps else [self._forward_backward()]
        self._rest = self._rest[len(done) :]
        return done

    def _steps(self) -> list[Step]:
        due = itertools.takewhile(lambda instruction: isinstance(instruction, Step), self._rest)
        return [step for step in due if isinstance(step, Step)]

    def _shares(self) -> dict[str, int]:
        """Tokens of each job in the microbatch that is next."""
        shares: dict[str, int] = {}
        for segment in self._upcoming(self._rest[:1]).segments:
            shares[segment.job] = shares.get(segment.job, 0) + segment.length
        return shares

    def _forward_backward(self) -> Event:
        microbatch, shares = self._upcoming(self._rest), self._shares()
        batch = self._prepare(microbatch) if self._ready is None else self._ready
        self._ready = None
        rows = batch.num_rows
        with self._timeline.span("forward_backward", tokens=microbatch.num_tokens, jobs=shares, rows=rows):
            run_microbatch(self._backbone, self._jobs, microbatch, batch, self._row_tile, self._meanwhile)
        return MicrobatchDone(", ".join(shares), microbatch.num_tokens, rows, self._timeline.spans[-1].duration_s)

    def _meanwhile(self) -> None:
        following = self._upcoming(self._rest[1:])
        if following.segments:
            self._ready = self._prepare(following)
            return
        queues = [job.queue_after(self._rest) for job in self._jobs.values()]
        self._plans.foresee([queue for queue in queues if queue is not None], self._limits)

    def _prepare(self, microbatch: Microbatch) -> PackedBatch:
        with self._timeline.span("prepare"):
            return prepare(self._backbone, self._jobs, microbatch, self._row_tile)

    def _take(self, steps: Sequence[Step]) -> list[StepDone]:
        jobs = [self._jobs[step.job] for step in steps]
        with self._timeline.span("step", jobs={step.job: 0 for step in steps}):
            results = take_steps(jobs)
        return [
            StepDone(
                job.spec.name,
                job.step,
                job.num_steps,
                job.epoch,
                result.loss,
                result.grad_norm,
                result.learning_rate,
                result.tokens,
                job.num_tokens,
                self._timeline.now(),
                result.skipped,
            )
            for job, result in zip(jobs, results, strict=True)
        ]

    def _upcoming(self, instructions: Sequence[Instruction]) -> Microbatch:
        """The first microbatch of some instructions; an empty one if they hold none."""
        found = (i.microbatch for i in instructions if isinstance(i, ForwardBackward))
        return next(found, Microbatch(()))
