"""Plans the next program while the current one trains, and learns how long microbatches take.

A program made ahead is used only for the very queues it was made for. Who made a program changes no result, so training
never waits for a slow planner: what is not ready in time, or could not be foreseen, is planned at once within a
hundredth of the time it is going to run, as the microbatches before have taught. Nor does training end where a slow
planner fails or breaks a rule: the simple one plans in its place, and it is said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from weft.engine.events import JobWarning
from weft.engine.timeline import TimelineRecorder
from weft.errors import PlanError
from weft.plan.check import violations
from weft.plan.cost.fit import TIME_TERMS, MicrobatchLoad, OnlineFit
from weft.plan.cost.learned import PASSES, PairPace, StagePace
from weft.plan.cost.types import LinearCost
from weft.plan.pack import pack
from weft.plan.pack.planners import ExactPlanner
from weft.plan.pipeline.append import ContinuedProgram, PassCosts, open_pipe
from weft.plan.pipeline.build import Schedule
from weft.plan.pipeline.planner import PipelinePlanner
from weft.plan.program import Planner, Program
from weft.plan.simulate.choose import FastestPipeline, PipelineChoice
from weft.plan.simulate.choose_spread import FastestSpread, PreviousMicrobatches
from weft.plan.simulate.timeline import Span
from weft.plan.spread.planner import HomeLoad, SpreadPlanner, max_lead
from weft.plan.types import JobQueue, Limits, Microbatch

WAITING_SHARE = 0.01
"""Of a program's own time, the most that training waits for it."""
SHORTEST_WAIT_S = 0.001
"""A plan that is all but ready is worth as much, whatever is known."""
LEARN_EVERY = 32
"""Microbatches from one fit to the next. A run that is shorter never loads the solver."""


@dataclass
class MeasuredPace:
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


@dataclass(frozen=True)
class PlannedProgram:
    """A program that was planned."""

    program: Program
    span: Span
    choice: PipelineChoice | None = None
    """How its jobs are grouped, where that was a question."""
    num_measured: int = 0
    """Passes that the choice rests on."""


@dataclass(frozen=True)
class _Asked:
    """What a program is to be made for."""

    queues: list[JobQueue]
    limits: Limits
    behind: PreviousMicrobatches = ()


SLOW = ExactPlanner | FastestPipeline | FastestSpread
"""Planners that another one stands in for where they are too late, or wrong."""


class LookaheadPlanner:
    """Programs of one planner, each checked before it is used."""

    def __init__(self, planner: Planner, timeline: TimelineRecorder) -> None:
        self._planner = planner
        self._timeline = timeline
        self._thread = ThreadPoolExecutor(1, "weft-plan")
        self._ahead: tuple[_Asked, Future[PlannedProgram]] | None = None
        self.pace = MeasuredPace()
        self.stages = StagePace()
        self._pairs = PairPace()
        self._chosen: PlannedProgram | None = None
        """The last one of which the groups have not been told."""
        self._mistake: str | None = None
        """What the slow planner has done wrong first."""
        self._warned_of_bad_plan = False
        self._told: tuple[int, bool, bool] | None = None
        """How many groups were told last, whether from measurements, and whether there were pairs."""

    def program(
        self,
        queues: list[JobQueue],
        limits: Limits,
        behind: PreviousMicrobatches = (),
        *,
        patience_s: float | None = None,
    ) -> Program:
        """The program for these queues; at once if it was foreseen, and never late.

        `behind`: of each replica, the last microbatches of the program that it is appended to; `patience_s`: how long
        that one still runs for sure.
        """
        asked = _Asked(queues, limits, behind)
        with self._timeline.span("plan"):
            if self._ahead is None or self._ahead[0] != asked:
                return self._at_once(asked)
            made = self._ahead[1]
            if not made.done():
                greedy = self._make(self._quick, asked).program
                wait_s = WAITING_SHARE * self.pace.seconds(greedy) if patience_s is None else patience_s
                try:
                    made.result(max(SHORTEST_WAIT_S, wait_s))
                except TimeoutError:
                    return greedy
            return self._collect()

    def foresee(self, queues: list[JobQueue], limits: Limits, behind: PreviousMicrobatches = ()) -> None:
        """Plans for queues that are likely to come next, beside training; not while an older plan is being made."""
        if self._ahead is not None:
            if not self._ahead[1].done():
                return
            untold = self._chosen
            self._collect()
            if self._chosen is not None and self._chosen.program.pairs:
                # Nobody has asked for it: what is said to run side by side does.
                self._chosen = untold
        if queues:
            asked = _Asked(queues, limits, behind)
            self._ahead = (asked, self._thread.submit(self._make, self._planner, asked))

    def home_seconds(self, jobs: Mapping[str, HomeLoad], limits: Limits) -> Mapping[str, Sequence[float]]:
        """Of a global batch of each job that has one home, by replica; none where there are no several replicas."""
        planner = self._planner.quick if isinstance(self._planner, FastestSpread) else self._planner
        return planner.home_seconds(jobs, limits.capacity) if isinstance(planner, SpreadPlanner) else {}

    def endless(self, limits: Limits) -> ContinuedProgram | None:
        """For programs that go on, where those of the planner can: a pipeline whose schedule never flushes it."""
        planner = self._planner.quick if isinstance(self._planner, FastestSpread) else self._planner
        if isinstance(planner, FastestPipeline) and planner.num_stages > 1:
            return ContinuedProgram(open_pipe(planner.num_stages, planner.memory_bytes(limits.capacity)))
        if isinstance(planner, PipelinePlanner) and planner.num_stages > 1 and planner.schedule is Schedule.EAGER:
            return ContinuedProgram(open_pipe(planner.num_stages))
        if isinstance(planner, SpreadPlanner) and len(planner.replica_sizes) > 1 and not planner.shards:
            return ContinuedProgram(*(open_pipe(size, max_lead=max_lead(size)) for size in planner.replica_sizes))
        return None

    def costs(self) -> Sequence[PassCosts]:
        """What passes are taken to cost on each replica where programs are appended."""
        match self._planner:
            case FastestPipeline():
                planner, _ = self._informed(self._planner)
                return [(planner.cost, planner.adapters)]
            case FastestSpread():
                spread, _ = self._informed_spread(self._planner)
                return spread.measured or [(cost, None) for cost in spread.quick.costs]
            case SpreadPlanner(costs=costs):
                return [(cost, None) for cost in costs]
        return [(LinearCost(), None)]

    def observe(self, microbatch: Microbatch, seconds: float) -> None:
        """Notes how long a microbatch took, and now and then learns from all of them, beside training."""
        pace = self.pace
        pace.fit.observe(pace.load(microbatch), seconds)
        pace.num_seen += 1
        if pace.num_seen % LEARN_EVERY == 0:
            self._thread.submit(pace.fit.learn, pace.fit.seen)

    def _at_once(self, asked: _Asked) -> Program:
        planner = self._planner
        if isinstance(planner, ExactPlanner):
            planner = planner.within(WAITING_SHARE * self.pace.seconds(pack(asked.queues, asked.limits)))
        elif isinstance(planner, FastestPipeline | FastestSpread):
            planner = planner.quick
        return self._make(planner, asked).program

    def observe_stages(self, program: Program, spans: Sequence[Span]) -> None:
        """Notes what the passes and steps of a program took on every stage; two side by side tell of neither."""
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
        """How the jobs of the program that was handed out last are grouped, if that is news."""
        chosen, self._chosen = self._chosen, None
        if chosen is None or chosen.choice is None:
            return None
        now = len(chosen.choice.groups), chosen.num_measured > 0, bool(chosen.program.pairs)
        before, self._told = self._told, now
        return chosen if self._told != before else None

    def pop_warnings(self) -> list[JobWarning]:
        """What the slow planner has done wrong first, once."""
        if self._mistake is None or self._warned_of_bad_plan:
            return []
        self._warned_of_bad_plan = True
        said = "a plan was of no use, and a simpler one runs in its place; no result depends on it"
        return [JobWarning((), f"{said} ({self._mistake})")]

    @property
    def takes_long(self) -> bool:
        """Whether stages would wait for a program that was not made ahead, or get a lesser one."""
        return isinstance(self._planner, FastestPipeline | FastestSpread)

    @property
    def _quick(self) -> Planner:
        """What plans where nobody can wait."""
        return self._planner.quick if isinstance(self._planner, FastestPipeline | FastestSpread) else pack

    def _collect(self) -> Program:
        """What has been made ahead, its time on record."""
        assert self._ahead is not None
        made, self._ahead = self._ahead[1], None
        found = made.result()
        # Here, not in the thread that made it: the last span is always one of training's own.
        self._timeline.spans.append(found.span)
        self._chosen = found if found.choice is not None else None
        return found.program

    def _make(self, planner: Planner, asked: _Asked) -> PlannedProgram:
        try:
            return self._made(planner, asked)
        except Exception as error:
            if not isinstance(planner, SLOW):
                raise
            self._mistake = self._mistake or f"{type(planner).__name__}: {str(error) or type(error).__name__}"
        return self._made(self._quick, asked)

    def _made(self, planner: Planner, asked: _Asked) -> PlannedProgram:
        start, choice, num_measured = self._timeline.now(), None, 0
        queues, limits = asked.queues, asked.limits
        if isinstance(planner, FastestPipeline):
            planner, num_measured = self._informed(replace(planner, behind=asked.behind[0] if asked.behind else ()))
            choice = planner.choose(queues, limits)
        elif isinstance(planner, FastestSpread):
            planner, num_measured = self._informed_spread(replace(planner, behind=asked.behind))
            choice = planner.choose(queues, limits)
        program = planner(queues, limits) if choice is None else choice.program
        problems = violations(program, queues, limits)
        if problems or not any(program.stages):
            raise PlanError("; ".join(problems[:3]) or "the program is empty")
        return PlannedProgram(
            program, Span("plan_ahead", start, self._timeline.now() - start, {}), choice, num_measured
        )

    def _informed(self, planner: FastestPipeline) -> tuple[FastestPipeline, int]:
        """The same with what was measured of the stages, as soon as that is enough, and how many passes that is."""
        learned = self.stages.learn(planner.num_stages, planner.cost, self.pace.ranks)
        if learned is None:
            return planner, 0
        cost, adapters = learned
        if planner.pairs is not None:
            planner = replace(planner, pairs=replace(planner.pairs, measured=self._pairs.learn(cost.passes)))
        return replace(planner, cost=cost, adapters=adapters, row_tile=self.stages.row_tile), self.stages.num_seen

    def _informed_spread(self, planner: FastestSpread) -> tuple[FastestSpread, int]:
        """The same of several replicas, as soon as enough was measured of each."""
        learned, first = [], 0
        for size, cost in zip(planner.quick.replica_sizes, planner.quick.costs, strict=True):
            found = self.stages.learn(size, cost, self.pace.ranks, first)
            if found is None:
                return planner, 0
            learned.append(found)
            first += size
        return replace(planner, measured=tuple(learned), row_tile=self.stages.row_tile), self.stages.num_seen
