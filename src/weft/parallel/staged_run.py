"""Runs programs on the stages of one or more replicas: stages get a whole program, and it is counted after it has run.

A pipeline is only full if the next microbatch need not wait for the host, so stages get whole programs. A program ends
for a job where its weights are needed: at an evaluation, a checkpoint or its end. Pipelines stay full all the same:
while stages run a program, the next is planned and appended to it (`plan/pipeline/append.py`), so jobs may be further
than their counts. Jobs that have come meanwhile are in the next program. For a checkpoint, stages keep a copy of the
job's state after the step. A job that gets another home is left out of a program, and moves when none of its work is
under way. An evaluation needs the stages themselves, so nothing is appended to a program that ends with one. All
started work is counted before a job is paused, cancelled or failed.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from weft.engine.events import Event, JobsGrouped, MicrobatchDone, MicrobatchesPaired
from weft.engine.execute.protocol import (
    Executor,
    Ticket,
)
from weft.engine.jobs.live_job import LiveJob
from weft.engine.lookahead import LookaheadPlanner
from weft.engine.program_run import ProgramRun
from weft.engine.timeline import TimelineRecorder
from weft.objectives.objective import Score
from weft.parallel.stages.work import FinishWork, MoveWork, StagedOutcome, StagedWork
from weft.plan.cost.learned import PassCosts
from weft.plan.level import choose_homes
from weft.plan.pipeline.append import DealtStream
from weft.plan.pipeline.stream import read_stream
from weft.plan.planner import HomeLoad
from weft.plan.program import Program, Step, Turn
from weft.plan.simulate.step_shares import step_spans
from weft.plan.types import JobQueue, Limits, Microbatch, Segment
from weft.store.wall_clock import Activity

BEHIND = 4
"""Number of microbatches per stage, at the end of a program, that matter to the next one."""


def last_of(program: Program) -> tuple[tuple[Microbatch, ...], ...]:
    """Microbatches of each replica that matter to the next program."""
    dealt = DealtStream.of(program)
    return tuple(
        tuple(dealt.microbatches[k] for k in indices[-BEHIND * len(devices) :])
        for indices, devices in zip(dealt.indices, program.replicas, strict=True)
    )


@dataclass(frozen=True)
class _Begun:
    program: Program
    rates: Mapping[tuple[str, int], float]
    kept: Collection[tuple[str, int]]
    """Steps after which stages keep a copy of the job's state."""
    ticket: Ticket[StagedOutcome]
    begun_s: float
    costs: Sequence[PassCosts] = ()
    """Costs of each replica with which the program was planned; empty unless replicas share a job."""


class StagedRun(ProgramRun):
    """Runs programs of several stages, each alone or appended to the one before."""

    def __init__(
        self,
        executor: Executor,
        running: Sequence[LiveJob],
        plans: LookaheadPlanner,
        limits: Limits,
        row_tile: int,
        timeline: TimelineRecorder,
    ) -> None:
        find_homes(running, plans, limits)
        super().__init__(executor, running, plans, limits, row_tile, timeline)
        self._training = list(running)
        self._begun: deque[_Begun] = deque()
        self._shares_jobs = any(job.home is None for job in running)
        self._rest: Program | None = plans.program([job.queue_until_due() for job in running], limits)
        self._endless = plans.endless(limits)
        self._num_counted = 0
        self._last_s = 0.0
        self._counted_s = 0.0
        self._step_end_s = 0.0

    @property
    def is_under_way(self) -> bool:
        return bool(self._begun)

    def continue_with(self, running: Sequence[LiveJob], limits: Limits) -> bool:
        if not self._begun:
            return False
        self._limits = limits
        self._training = list(running)
        under_way = {job: self._jobs[job] for begun in self._begun for job, _ in begun.rates}
        self._know(under_way | {job.name: job for job in running})
        return True

    def next_jobs(self) -> list[str]:
        return list(self._jobs) if self._begun or self._rest is not None else []

    def advance(self) -> list[Event]:
        """Counts the oldest program, after appending the next one."""
        self.is_mid_step = True
        if not self._begun:
            program, self._rest = self._rest, None
            assert program is not None, "a program runs once"
            self._begin(program)
        while self._endless is not None and not self._endless.is_issued(self._num_counted):
            following = self._following()
            if following is None:
                self._begin_rest()
            else:
                self._begin(following)
        done = self._count()
        if any(job.progress.diverged for job in self._jobs.values()):
            done += self._count_all()
        self.is_mid_step = bool(self._begun)
        return done

    def finish(self) -> list[Event]:
        self.is_mid_step = True
        done = self._count_all()
        self.is_mid_step = False
        return done

    def _following(self) -> Program | None:
        """The program after those under way; None where it has to wait for them."""
        if self._is_eval_due() or (not self._shares_jobs and any(job.home is None for job in self._training)):
            # Routes between replicas are opened while no stage is at work.
            return None
        queues = self._queues_after()
        if not queues:
            return None
        behind = last_of(self._begun[-1].program)
        return self._plans.program(queues, self._limits, behind, patience_s=self._last_s / 2)

    def _is_eval_due(self) -> bool:
        """True if an evaluation is due at the end of what is under way: it needs the stages and those weights."""
        jobs = self._jobs.values()
        return any(job.begun_step is not None and job.is_eval_due_at(job.begun_step) for job in jobs)

    def _queues_after(self, more: Sequence[tuple[str, int]] = ()) -> list[JobQueue]:
        """Queues after all that is under way and these further steps. A job to move waits for its work to end."""
        leaving = find_homes(self._training, self._plans, self._limits)
        steps = [*(step for begun in self._begun for step in sorted(begun.rates)), *more]
        turns = [Turn(Microbatch(()), (Step(*step),)) for step in steps]
        queues = [job.queue_until_due_after(turns) for job in self._training if job.name not in leaving]
        return [queue for queue in queues if queue is not None]

    def _begin(self, program: Program) -> None:
        """Starts a program after what is under way, and has the next one planned meanwhile."""
        steps = sorted({(i.job, i.step) for own in program.stages for i in own if isinstance(i, Step)})
        rates = {(job, step): self._jobs[job].progress.learning_rate(step) for job, step in steps}
        work = StagedWork(program, self._row_tile, rates)
        costs = self._plans.costs() if len(program.replicas) > 1 or self._endless is not None else ()
        # A planner that is a plain function has no costs of replicas.
        is_shared = 1 < len(costs) == len(program.replicas) and any(self._jobs[job].home is None for job, _ in steps)
        if self._endless is not None:
            self._executor.wait(self._executor.start(MoveWork(program)))
            first = self._endless.num_microbatches
            self._endless.limit(self._plans.pipes(self._limits))
            lists = self._endless.append(DealtStream.of(program), costs)
            work = dataclasses.replace(work, lists=lists, first=first, kept=self._kept(steps))
        elif self._plans.takes_long and not any(self._jobs[job].is_eval_due_at(step + 1) for job, step in steps):
            # The executor returns when all of it has run.
            self._plans.foresee(self._queues_after(steps), self._limits)
        begun_s = time.perf_counter()
        ticket = self._executor.start(work)
        self._begun.append(_Begun(program, rates, work.kept.keys(), ticket, begun_s, costs if is_shared else ()))
        for job, step in steps:
            self._jobs[job].begun_step = step + 1
        if self._endless is not None and self._plans.takes_long and not self._is_eval_due():
            self._plans.foresee(self._queues_after(), self._limits, last_of(program))

    def _kept(self, steps: Sequence[tuple[str, int]]) -> dict[tuple[str, int], int]:
        """Last steps of a program at which a checkpoint is due: stages keep a copy of the state, since the job may be
        further when it is saved. Steps with an evaluation are left out: the job waits for the evaluation, whose best
        weights are saved too."""
        found = {}
        for name, step in dict(steps).items():
            job = self._jobs[name]
            if job.is_eval_due_at(step + 1):
                continue
            if job.is_save_due_at(step + 1, self._timeline.own_s()) and step + 1 < job.num_steps:
                found[name, step] = job.step
        return found

    def _begin_rest(self) -> None:
        if self._endless is not None and not self._endless.is_issued(self._endless.num_programs - 1):
            self._executor.wait(self._executor.start(FinishWork(self._endless.end())))

    def _count_all(self) -> list[Event]:
        if self._begun:
            self._begin_rest()
        done: list[Event] = []
        while self._begun:
            done += self._count()
        return done

    def _count(self) -> list[Event]:
        begun = self._begun[0]
        outcome = self._executor.wait(begun.ticket)
        self._begun.popleft()
        self._num_counted += 1
        now_s = time.perf_counter()
        self._last_s, self._counted_s = now_s - max(begun.begun_s, self._counted_s), now_s
        self._record(outcome, begun)
        done = [*self._grouped(), *self._counted(begun.program, outcome, begun.rates)]
        self._plans.observe_stages(begun.program, outcome.spans)
        ahead = {job for later in self._begun for job, _ in later.rates}
        for name in {job for job, _ in begun.rates}:
            job = self._jobs[name]
            job.kept_step = job.step if (name, job.step - 1) in begun.kept else None
            if name not in ahead:
                job.begun_step = None
        return done

    def _grouped(self) -> list[Event]:
        made = self._plans.pop_choice()
        if made is None or made.choice is None or len(self._jobs) < 2:
            return []
        choice = made.choice
        paired = list[Event]()
        if choice.pairs is not None:
            paired.append(
                MicrobatchesPaired(choice.pairs.num_pairs, choice.pairs.gain, choice.groups, made.num_measured)
            )
            if choice.pairs.num_pairs:
                return paired
        against_s = choice.one_group_s if len(choice.groups) > choice.num_replicas else choice.several_groups_s
        gain = None if against_s is None else abs(against_s - choice.seconds) / choice.one_group_s
        return [JobsGrouped(choice.groups, choice.fills, gain, made.num_measured, choice.num_replicas), *paired]

    def _counted(self, program: Program, outcome: StagedOutcome, rates: Mapping[tuple[str, int], float]) -> list[Event]:
        """Counts every sample and step; a diverged job counts nothing after the step that showed it. Samples of a
        global batch are counted in order, wherever they ran: their losses are summed."""
        done: list[Event] = []
        scores: dict[tuple[str, int], list[tuple[Segment, Score]]] = {}
        completes = read_stream(program.microbatches).completes
        ended_s = self._step_ends(outcome)
        for k, (microbatch, found) in enumerate(zip(program.microbatches, outcome.microbatches, strict=True)):
            for segment, score in zip(microbatch.segments, found.scores, strict=True):
                scores.setdefault((segment.job, segment.step), []).append((segment, score))
            if microbatch.segments:
                jobs, tokens = tuple(microbatch.job_tokens), microbatch.num_tokens
                done.append(MicrobatchDone(jobs, tokens, found.num_rows, found.seconds, found.num_reference_rows))
            for step in completes.get(k, []):
                job = self._jobs[step[0]]
                if not job.progress.diverged:
                    for segment, score in sorted(scores.pop(step), key=lambda pair: pair[0].index):
                        job.progress.add_score(segment, score)
                    done.append(self._count_step(step[0], rates[step], outcome.steps[step], ended_s[step]))
        return done

    def _step_ends(self, outcome: StagedOutcome) -> dict[tuple[str, int], float]:
        """Seconds of the run at which each step was done on all stages."""
        found = dict.fromkeys(outcome.steps, 0.0)
        for span in outcome.spans:
            for job in span.args["jobs"] if span.name == "step" else ():
                step = (job, span.args["step"])
                found[step] = max(found[step], self._timeline.at(span.end_s))
        return found

    def _record(self, outcome: StagedOutcome, begun: _Begun) -> None:
        """Adds the stages' spans to the timeline, and what replicas that share a job did in each step; the wall clock
        counts the program once."""
        spans = [dataclasses.replace(span, start_s=self._timeline.at(span.start_s)) for span in outcome.spans]
        self._timeline.spans.extend(spans)
        if begun.costs:
            steps = step_spans(begun.program, begun.costs, spans, self._step_end_s)
            self._timeline.spans.extend(steps)
            self._step_end_s = max((step.end_s for step in steps), default=self._step_end_s)
        ended_s = time.perf_counter()
        self._timeline.wall.add(Activity.COMPUTING, ended_s - begun.begun_s, ended_s)


def find_homes(jobs: Sequence[LiveJob], plans: LookaheadPlanner, limits: Limits) -> set[str]:
    """Sets the replica of every job that is not on all of them. Jobs with work under way stay; those to move later are
    returned."""
    own = {job.name: job for job in jobs if job.home is not None}
    before = {name: job.home for name, job in own.items() if job.has_home_replica and job.home is not None}
    loads = {name: HomeLoad(own[name].step_tokens, own[name].longest) for name in sorted(own)}
    leaving = set[str]()
    for name, home in choose_homes(plans.home_seconds(loads, limits), before).items():
        if own[name].begun_step is None:
            own[name].home, own[name].has_home_replica = home, True
        elif own[name].home != home:
            leaving.add(name)
    return leaving
