"""Plans the next program while the current one trains, and learns how long microbatches take.

A program planned ahead is used only for exactly the queues it was planned for. Which planner made a program changes no
result, so training never waits for a slow one: if a program is not ready in time, or its queues were not foreseen, the
planner gets a hundredth of the program's predicted time, or the quick planner takes its place. The quick planner also
takes over, with one warning, when a slow one fails or breaks a rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from weft.engine.events import JobWarning
from weft.engine.timeline import TimelineRecorder
from weft.errors import PlanError
from weft.plan.check import violations
from weft.plan.cost.fit import TIME_TERMS, MicrobatchLoad, OnlineFit
from weft.plan.cost.learned import PASSES, PairPace, PassCosts, StagePace
from weft.plan.pack import pack
from weft.plan.pack.planners import FunctionPlanner
from weft.plan.pipeline.append import ContinuedProgram
from weft.plan.pipeline.orders import Pipe
from weft.plan.planner import (
    HomeLoad,
    MeasuredPasses,
    PipelineChoice,
    PlanFunction,
    Planner,
    PreviousMicrobatches,
)
from weft.plan.program import Program
from weft.plan.simulate.timeline import Span
from weft.plan.types import JobQueue, Limits, Microbatch

WAITING_SHARE = 0.01
"""Share of a program's predicted time that training waits for its plan at most."""
SHORTEST_WAIT_S = 0.001
"""Minimum number of seconds that training waits for a plan, since many are almost ready."""
LEARN_EVERY = 32
"""Microbatches from one fit to the next. A run that is shorter never loads the solver."""


@dataclass
class MeasuredPace:
    fit: OnlineFit = field(default_factory=lambda: OnlineFit(TIME_TERMS))
    ranks: Mapping[str, int] = field(default_factory=dict)
    row_tile: int = 1
    num_seen: int = 0

    def load(self, microbatch: Microbatch) -> MicrobatchLoad:
        by_rank = [(self.ranks.get(job, 0), own) for job, own in microbatch.job_lengths.items()]
        return MicrobatchLoad.of(by_rank, 0, self.row_tile)

    def seconds(self, program: Program) -> float:
        """Predicted time of a program's microbatches; 0 before anything is known."""
        return sum(self.fit.predict(self.load(microbatch)) or 0.0 for microbatch in program.microbatches)


@dataclass(frozen=True)
class PlannedProgram:
    program: Program
    span: Span
    choice: PipelineChoice | None = None
    num_measured: int = 0
    """Measured passes that the choice rests on."""


@dataclass(frozen=True)
class _Request:
    queues: list[JobQueue]
    limits: Limits
    previous: PreviousMicrobatches = ()


class LookaheadPlanner:
    def __init__(self, planner: PlanFunction, timeline: TimelineRecorder) -> None:
        self.planner: Planner = planner if isinstance(planner, Planner) else FunctionPlanner(planner)
        self._timeline = timeline
        self._thread = ThreadPoolExecutor(1, "weft-plan")
        self._ahead: tuple[_Request, Future[PlannedProgram]] | None = None
        self.pace = MeasuredPace()
        self.stages = StagePace()
        self._pairs = PairPace()
        self._has_pairs, self._num_pair_changes = False, 0
        self._unreported: PlannedProgram | None = None
        self._reported: tuple[int, bool, bool] | None = None
        """Last reported choice: number of groups, whether it rests on measurements, and whether it has pairs."""
        self._mistake: str | None = None
        """The first error of a planner that the quick one replaced."""
        self._warned_of_bad_plan = False

    def program(
        self,
        queues: list[JobQueue],
        limits: Limits,
        previous: PreviousMicrobatches = (),
        *,
        patience_s: float | None = None,
    ) -> Program:
        """The program for these queues; without delay if they were foreseen, and never late. `previous`: the program's
        predecessors when it is appended to them; `patience_s`: how long these still run."""
        request = _Request(queues, limits, previous)
        with self._timeline.span("plan"):
            if self._ahead is None or self._ahead[0] != request:
                return self._plan_at_once(request)
            made = self._ahead[1]
            if not made.done():
                quick = self._plan(self.planner.quick, request).program
                wait_s = WAITING_SHARE * self.pace.seconds(quick) if patience_s is None else patience_s
                try:
                    made.result(max(SHORTEST_WAIT_S, wait_s))
                except TimeoutError:
                    return quick
            planned = self._collect()
            self._note_pairs(planned)
            return planned.program

    def foresee(self, queues: list[JobQueue], limits: Limits, previous: PreviousMicrobatches = ()) -> None:
        """Plans for queues that are likely to come next, beside training; skipped while an older plan is being made."""
        if self._ahead is not None:
            if not self._ahead[1].done():
                return
            unreported = self._unreported
            self._collect()
            if self._unreported is not None and self._unreported.program.pairs:
                # The collected program was never run, and a report about pairs must be about one that runs.
                self._unreported = unreported
        if queues:
            request = _Request(queues, limits, previous)
            self._ahead = (request, self._thread.submit(self._plan, self.planner, request))

    def home_seconds(self, jobs: Mapping[str, HomeLoad], limits: Limits) -> Mapping[str, Sequence[float]]:
        return self.planner.home_seconds(jobs, limits.capacity)

    def endless(self, limits: Limits) -> ContinuedProgram | None:
        """A program that others can be appended to without draining the pipelines; None if the planner has none."""
        pipes = self.pipes(limits)
        return ContinuedProgram(*pipes) if pipes else None

    def pipes(self, limits: Limits) -> Sequence[Pipe]:
        return self.planner.open_pipes(limits)

    def costs(self) -> Sequence[PassCosts]:
        return self.planner.informed(self._measured, ()).pass_costs

    def observe(self, microbatch: Microbatch, seconds: float) -> None:
        """Records how long a microbatch took, and now and then fits all of them, beside training."""
        pace = self.pace
        pace.fit.observe(pace.load(microbatch), seconds)
        pace.num_seen += 1
        if pace.num_seen % LEARN_EVERY == 0:
            self._thread.submit(pace.fit.learn, pace.fit.seen)

    def observe_stages(self, program: Program, spans: Sequence[Span]) -> None:
        """Records what a program's passes and steps took on every stage; passes side by side count as a pair only."""
        loads = [self.pace.load(microbatch) for microbatch in program.microbatches]
        self.stages.row_tile = self.pace.row_tile
        for span in spans:
            if span.name == "step":
                self.stages.note_step(span.stage, span.duration_s)
            elif span.name in PASSES and "beside" not in span.args:
                self.stages.note_pass(span.name, span.stage, loads[span.args["microbatch"]], span.duration_s)
                if "sums_s" in span.args:
                    self._pairs.note_sums((span.name, span.stage), span.args["sums_s"], span.duration_s)
        beside = {
            (span.name, span.stage, span.args["microbatch"]): span
            for span in spans
            if span.name in PASSES and "beside" in span.args
        }
        for (name, stage, first), one in beside.items():
            second = one.args["beside"]
            if first < second:
                other = beside[name, stage, second]
                seconds = max(one.end_s, other.end_s) - min(one.start_s, other.start_s)
                self._pairs.note_pair((name, stage), (loads[first], loads[second]), seconds)

    def pop_choice(self) -> PlannedProgram | None:
        """The last program whose grouping differs from the one reported before; each is returned once."""
        chosen, self._unreported = self._unreported, None
        if chosen is None or chosen.choice is None:
            return None
        now = len(chosen.choice.groups), chosen.num_measured > 0, bool(chosen.program.pairs)
        before, self._reported = self._reported, now
        return chosen if now != before else None

    def pop_warnings(self) -> list[JobWarning]:
        """The first error of a planner that was replaced, once."""
        if self._mistake is None or self._warned_of_bad_plan:
            return []
        self._warned_of_bad_plan = True
        message = "a plan was of no use, and a simpler one runs in its place; no result depends on it"
        return [JobWarning((), f"{message} ({self._mistake})")]

    @property
    def takes_long(self) -> bool:
        """True if stages would wait for a program that was not planned ahead, or get a lesser one."""
        return self.planner.can_be_replaced

    @property
    def _measured(self) -> MeasuredPasses:
        return MeasuredPasses(self.stages, self._pairs, self.pace.ranks, self._has_pairs, self._num_pair_changes)

    def _plan_at_once(self, request: _Request) -> Program:
        budget_s = 0.0
        if self.planner.has_budget:
            budget_s = WAITING_SHARE * self.pace.seconds(pack(request.queues, request.limits))
        return self._plan(self.planner.within(budget_s), request).program

    def _note_pairs(self, planned: PlannedProgram) -> None:
        pairs = None if planned.choice is None else planned.choice.pairs
        if pairs is not None and pairs.gain is not None and (pairs.num_pairs > 0) != self._has_pairs:
            self._has_pairs = not self._has_pairs
            self._num_pair_changes += 1

    def _collect(self) -> PlannedProgram:
        """The program that was planned ahead; its time goes into the timeline."""
        assert self._ahead is not None
        made, self._ahead = self._ahead[1], None
        planned = made.result()
        # Here, not in the thread that made it: the last span is always one of training's own.
        self._timeline.spans.append(planned.span)
        self._unreported = planned if planned.choice is not None else None
        return planned

    def _plan(self, planner: Planner, request: _Request) -> PlannedProgram:
        try:
            return self._checked(planner, request)
        except Exception as error:
            if not planner.can_be_replaced:
                raise
            self._mistake = self._mistake or f"{type(planner).__name__}: {str(error) or type(error).__name__}"
        return self._checked(planner.quick, request)

    def _checked(self, planner: Planner, request: _Request) -> PlannedProgram:
        start, queues, limits = self._timeline.now(), request.queues, request.limits
        planner = planner.informed(self._measured, request.previous)
        choice = planner.choose(queues, limits)
        program = planner(queues, limits) if choice is None else choice.program
        problems = violations(program, queues, limits)
        if problems or not any(program.stages):
            raise PlanError("; ".join(problems[:3]) or "the program is empty")
        span = Span("plan_ahead", start, self._timeline.now() - start, {})
        return PlannedProgram(program, span, choice, planner.num_measured)
