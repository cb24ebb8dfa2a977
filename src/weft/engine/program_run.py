"""One program under way. While a microbatch runs, the host makes ready what follows.

That is the next microbatch of the program and, in a thread of its own, the next program. Both are exact: packing a
microbatch changes no job, so one that is not needed after all is just dropped; a program made ahead is used only for
the very queues it was made for. A device that works on by itself gets the steps behind a microbatch, and the microbatch
behind those, before the first is waited for: within a program it does not wait for the host. Steps then learn on the
device whether a loss was finite, and what has been started is always counted before anything else is decided. Who made
a program changes no result, so training never waits for a slow planner: what is not ready in time, or could not be
foreseen, is planned at once within a hundredth of the time it is going to run, as the microbatches before have taught.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from weft.adapters.methods import cost_ranks
from weft.backbone.backbone import Backbone
from weft.backbone.out_of_memory import memory_errors
from weft.backbone.packed import PackedBatch
from weft.cost.fit import TIME_TERMS, MicrobatchLoad, OnlineFit
from weft.engine.events import Event, MicrobatchDone, StepDone
from weft.engine.live_job import LiveJob, StepResult, begin_steps
from weft.engine.microbatch import MicrobatchInFlight, prepare
from weft.engine.timeline import TimelineRecorder
from weft.plan.check import violations
from weft.plan.pack import pack
from weft.plan.pack.planners import ExactPlanner
from weft.plan.program import Planner, Program, Step, Turn
from weft.plan.types import JobQueue, Limits, Microbatch
from weft.simulate.timeline import Span

WAITING_SHARE = 0.01
"""Of a program's own time, the most that training waits for it."""
SHORTEST_WAIT_S = 0.001
"""A plan that is all but ready is worth as much, whatever is known."""
LEARN_EVERY = 32
"""Microbatches from one fit to the next. A run that is shorter never loads the solver."""


@dataclass
class LearnedPace:
    """How long microbatches take here, learnt from those that have run."""

    fit: OnlineFit = field(default_factory=lambda: OnlineFit(TIME_TERMS))
    ranks: Mapping[str, int] = field(default_factory=dict)
    """Of the jobs that train now."""
    row_tile: int = 1
    num_seen: int = 0

    def load(self, microbatch: Microbatch) -> MicrobatchLoad:
        """What a microbatch asks of the device."""
        lengths: dict[str, list[int]] = {}
        for segment in microbatch.segments:
            lengths.setdefault(segment.job, []).append(segment.length)
        return MicrobatchLoad.of([(self.ranks.get(job, 0), own) for job, own in lengths.items()], 0, self.row_tile)

    def seconds(self, program: Program) -> float:
        """What a program's microbatches are predicted to take; 0 before anything is known."""
        return sum(self.fit.predict(self.load(microbatch)) or 0.0 for microbatch in program.microbatches)


class LookaheadPlanner:
    """Programs of one planner, each checked before it is used."""

    def __init__(self, planner: Planner, timeline: TimelineRecorder) -> None:
        self._planner = planner
        self._timeline = timeline
        self._thread = ThreadPoolExecutor(1, "weft-plan")
        self._ahead: tuple[list[JobQueue], Limits, Future[tuple[Program, Span]]] | None = None
        self.pace = LearnedPace()

    def program(self, queues: list[JobQueue], limits: Limits) -> Program:
        """The program for these queues; at once if it was foreseen, and never late."""
        with self._timeline.span("plan"):
            if self._ahead is None or self._ahead[:2] != (queues, limits):
                return self._at_once(queues, limits)
            made = self._ahead[2]
            if not made.done():
                greedy, _ = self._make(pack, queues, limits)
                try:
                    made.result(max(SHORTEST_WAIT_S, WAITING_SHARE * self.pace.seconds(greedy)))
                except TimeoutError:
                    return greedy
            return self._collect()

    def foresee(self, queues: list[JobQueue], limits: Limits) -> None:
        """Plans for queues that are likely to come next, beside training; not while an older plan is being made."""
        if self._ahead is not None:
            if not self._ahead[2].done():
                return
            self._collect()
        if queues:
            self._ahead = (queues, limits, self._thread.submit(self._make, self._planner, queues, limits))

    def observe(self, microbatch: Microbatch, seconds: float) -> None:
        """Notes how long a microbatch took, and now and then learns from all of them, beside training."""
        pace = self.pace
        pace.fit.observe(pace.load(microbatch), seconds)
        pace.num_seen += 1
        if pace.num_seen % LEARN_EVERY == 0:
            self._thread.submit(pace.fit.learn, pace.fit.seen)

    def _at_once(self, queues: list[JobQueue], limits: Limits) -> Program:
        planner = self._planner
        if isinstance(planner, ExactPlanner):
            planner = planner.within(WAITING_SHARE * self.pace.seconds(pack(queues, limits)))
        return self._make(planner, queues, limits)[0]

    def _collect(self) -> Program:
        """What has been made ahead, its time on record."""
        assert self._ahead is not None
        made, self._ahead = self._ahead[2], None
        program, span = made.result()
        # Here, not in the thread that made it: the last span is always one of training's own.
        self._timeline.spans.append(span)
        return program

    def _make(self, planner: Planner, queues: list[JobQueue], limits: Limits) -> tuple[Program, Span]:
        start = self._timeline.now()
        program = planner(queues, limits)
        problems = violations(program, queues, limits)
        assert any(program.stages) and not problems, problems
        return program, Span("plan_ahead", start, self._timeline.now() - start, {})


class ProgramRun:
    """Runs one program: microbatches one by one, steps that follow each other together."""

    def __init__(
        self,
        backbone: Backbone,
        running: Sequence[LiveJob],
        plans: LookaheadPlanner,
        limits: Limits,
        row_tile: int,
        timeline: TimelineRecorder,
    ) -> None:
        self._backbone = backbone
        self._jobs = {job.spec.name: job for job in running}
        self._plans = plans
        self._limits = limits
        self._row_tile = row_tile
        self._timeline = timeline
        plans.pace.ranks = {job.spec.name: cost_ranks(job.spec.adapter).usual for job in running}
        plans.pace.row_tile = row_tile
        self._has_foreseen = False
        self._rest = deque(plans.program([job.queue() for job in running], limits).turns)
        self._ready: PackedBatch | None = None
        self._ahead: MicrobatchInFlight | None = None
        """The microbatch that is next, where it has been started already."""
        self._found_no_memory = False
        """Starting it was tried, and the memory ended."""

    def next_jobs(self) -> list[str]:
        """The jobs that the next call of `advance` is about; none at the end."""
        if not self._rest:
            return []
        turn = self._rest[0]
        return list(dict.fromkeys([*turn.microbatch.job_tokens, *(step.job for step in turn.steps)]))

    @memory_errors()
    def advance(self) -> list[Event]:
        """Runs the next microbatch with the steps behind it, or only steps that are due; says what has been done."""
        if self._found_no_memory:
            self._found_no_memory = False
            raise torch.OutOfMemoryError("the memory ended while the microbatch was started ahead")
        turn = self._rest[0]
        done = self._run(turn) if turn.microbatch.segments else self._take(turn.steps, None)
        self._rest.popleft()
        return done

    def wait(self) -> None:
        """Until the device has done what was started ahead, so that what follows is timed by itself."""
        if self._ahead is not None:
            self._ahead.wait()

    def finish(self) -> list[Event]:
        """Counts what has been started, so that jobs stand where their gradients do; nothing may come in between."""
        if self._found_no_memory:
            # Half of its gradients may be written.
            self._found_no_memory = False
            for name in self._rest[0].microbatch.job_tokens:
                self._jobs[name].rewind()
        if self._ahead is None:
            return []
        ahead, self._ahead = self._ahead, None
        return [self._count(ahead)]

    def _run(self, turn: Turn) -> list[Event]:
        current = self._ahead or self._start(turn.microbatch)
        self._ahead = None
        steps = turn.steps
        following = self._rest[1].microbatch if len(self._rest) > 1 else None
        self._meanwhile(following)
        begun = None
        if self._backbone.works_on:
            begun = current.begin_steps([self._jobs[step.job] for step in steps]) if steps else None
            with suppress(torch.OutOfMemoryError):
                self._found_no_memory = True
                self._start_ahead(following)
                self._found_no_memory = False
        done = [self._count(current)]
        return [*done, *self._take(steps, begun)] if steps else done

    def _start(self, microbatch: Microbatch) -> MicrobatchInFlight:
        batch = self._prepare(microbatch) if self._ready is None else self._ready
        self._ready = None
        return MicrobatchInFlight(self._backbone, self._jobs, microbatch, batch, self._row_tile)

    @memory_errors()
    def _start_ahead(self, microbatch: Microbatch | None) -> None:
        if microbatch is not None:
            self._ahead = self._start(microbatch)

    def _count(self, current: MicrobatchInFlight) -> Event:
        """Waits for a microbatch and learns from it."""
        microbatch, plans = current.microbatch, self._plans
        shares = microbatch.job_tokens
        predicted_s = plans.pace.fit.predict(plans.pace.load(microbatch))
        took_s = current.count()
        known = {} if predicted_s is None else {"predicted_s": predicted_s}
        args = {"tokens": microbatch.num_tokens, "jobs": shares, "rows": current.num_rows, **known}
        self._timeline.add("forward_backward", took_s, current.wait(), **args)
        plans.observe(microbatch, took_s)
        return MicrobatchDone(tuple(shares), microbatch.num_tokens, current.num_rows, took_s)

    def _meanwhile(self, following: Microbatch | None) -> None:
        if following is not None:
            self._ready = self._prepare(following)
        if not self._has_foreseen:
            self._has_foreseen = True
            queues = [job.queue_after(self._until_an_end()) for job in self._jobs.values()]
            self._plans.foresee([queue for queue in queues if queue is not None], self._limits)

    def _until_an_end(self) -> list[Turn]:
        """What runs before the jobs that train are others: all, or up to the steps with which a job ends, and what is
        started before they are known to be done."""
        turns = list(self._rest)
        for place, turn in enumerate(turns, start=1):
            if any(step.step + 1 == self._jobs[step.job].num_steps for step in turn.steps):
                begun = turns[place : place + self._backbone.works_on]
                return [*turns[:place], *(Turn(later.microbatch) for later in begun)]
        return turns

    def _prepare(self, microbatch: Microbatch) -> PackedBatch:
        with self._timeline.span("prepare"):
            return prepare(self._backbone, self._jobs, microbatch, self._row_tile)

    def _take(self, steps: Sequence[Step], begun: Callable[[], list[StepResult]] | None) -> list[Event]:
        """Waits for steps, which it starts if nobody has."""
        jobs = [self._jobs[step.job] for step in steps]
        with self._timeline.span("step", jobs={step.job: 0 for step in steps}):
            results = (begun or begin_steps(jobs))()
        return [
            StepDone(
                job.spec.name,
                job.step,
                job.num_steps,
                job.epoch,
                result.means.loss,
                result.means.accuracy,
                result.grad_norm,
                result.learning_rate,
                result.tokens,
                job.num_tokens,
                self._timeline.now(),
                result.skipped,
            )
            for job, result in zip(jobs, results, strict=True)
        ]
