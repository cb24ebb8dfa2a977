"""Runs one program on several stages, of one replica or of more: all of it at once, and then counts it.

A pipeline is full only while the next microbatch need not wait for the host, so stages get a whole program. It ends for
every job where something is due that needs its weights as they are then: an evaluation, a checkpoint, its end.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence

from weft.adapters.methods import cost_ranks
from weft.engine.events import Event, JobsGrouped, MicrobatchDone
from weft.engine.jobs.live_job import LiveJob
from weft.engine.lookahead import LookaheadPlanner
from weft.engine.program_run import count_step
from weft.engine.timeline import TimelineRecorder
from weft.execute.protocol import Executor, ReplicaLostError, StagedOutcome, StagedWork
from weft.objectives.metrics import Score
from weft.plan.pipeline.stream import read_stream
from weft.plan.program import Program, Step, Turn
from weft.plan.spread.homes import choose_homes
from weft.plan.types import Limits, Microbatch, Segment
from weft.wall_clock import Activity


def find_homes(jobs: Sequence[LiveJob], replica_sizes: Sequence[int]) -> None:
    """Says of every job that is not on all replicas which one it trains on; the more stages, the more it does."""
    own = {job.name: job for job in jobs if job.home is not None}
    loads = {name: job.progress.tokens_left for name, job in own.items()}
    before = {name: job.home for name, job in own.items() if job.home is not None}
    for name, home in choose_homes(loads, replica_sizes, before).items():
        own[name].home = home


class StagedRun:
    """Runs one program of several stages."""

    def __init__(
        self,
        executor: Executor,
        running: Sequence[LiveJob],
        plans: LookaheadPlanner,
        limits: Limits,
        row_tile: int,
        timeline: TimelineRecorder,
    ) -> None:
        self._executor = executor
        self._jobs = {job.spec.name: job for job in running}
        self._plans, self._limits = plans, limits
        self._row_tile = row_tile
        self._timeline = timeline
        find_homes(running, executor.facts.replica_sizes)
        plans.pace.ranks = {job.spec.name: cost_ranks(job.spec.adapter).usual for job in running}
        plans.pace.row_tile = row_tile
        self._rest: Program | None = plans.program([job.queue_until_due() for job in running], limits)
        self.is_mid_step = False
        """The program is under way: whatever happens to it, jobs may be ahead of what is known of them."""

        self.loss: ReplicaLostError | None = None
        """Why the program did not come to its end on all replicas."""

    def next_jobs(self) -> list[str]:
        """The jobs that the next call of `advance` is about; none at the end."""
        return [] if self._rest is None else list(self._jobs)

    def advance(self) -> list[Event]:
        """Runs the program; says what has been done in the order of its microbatches."""
        program, self._rest = self._rest, None
        assert program is not None, "a program runs once"
        steps = sorted({(i.job, i.step) for own in program.stages for i in own if isinstance(i, Step)})
        rates = {(job, step): self._jobs[job].progress.learning_rate(step) for job, step in steps}
        self._foresee(steps)
        self.is_mid_step = True
        begun_s = time.perf_counter()
        outcome = self._executor.wait(self._executor.start(StagedWork(program, self._row_tile, rates)))
        self._record(outcome, begun_s)
        self.loss = outcome.loss
        done = [*self._grouped(), *self._counted(program, outcome, rates)]
        self._plans.observe_stages(program, outcome.spans)
        self.is_mid_step = False
        return done

    def finish(self) -> list[Event]:
        """Has nothing left to count."""
        return []

    def _foresee(self, steps: Sequence[tuple[str, int]]) -> None:
        """Has the program after this one planned beside it, should nothing come in between."""
        if not self._plans.takes_long:
            return
        turns = [Turn(Microbatch(()), (Step(*step),)) for step in steps]
        queues = [job.queue_until_due_after(turns) for job in self._jobs.values()]
        self._plans.foresee([queue for queue in queues if queue is not None], self._limits)

    def _grouped(self) -> list[Event]:
        """Says who shares microbatches, where the planner had a choice."""
        made = self._plans.take_choice()
        if made is None or made.choice is None or len(self._jobs) < 2:
            return []
        choice = made.choice
        against_s = choice.one_group_s if len(choice.groups) > 1 else choice.several_groups_s
        gain = None if against_s is None else abs(against_s - choice.seconds) / choice.one_group_s
        return [JobsGrouped(choice.groups, choice.fills, gain, made.num_measured)]

    def _counted(self, program: Program, outcome: StagedOutcome, rates: Mapping[tuple[str, int], float]) -> list[Event]:
        """Counts every sample and step; a job that cannot go on counts nothing after the step that showed it.

        The samples of a global batch are counted in their order, wherever they ran: their losses are added up.
        """
        done: list[Event] = []
        scores: dict[tuple[str, int], list[tuple[Segment, Score]]] = {}
        completes = read_stream(program.microbatches).completes
        ended_s = self._step_ends(outcome)
        lost = {*outcome.loss.jobs} if outcome.loss is not None else set[str]()
        for k, (microbatch, found) in enumerate(zip(program.microbatches, outcome.microbatches, strict=True)):
            if microbatch.segments and lost >= microbatch.job_tokens.keys():
                # Of these jobs nothing counts; their replica may not even have run it.
                continue
            for segment, score in zip(microbatch.segments, found.scores, strict=True):
                scores.setdefault((segment.job, segment.step), []).append((segment, score))
            if microbatch.segments:
                jobs, tokens = tuple(microbatch.job_tokens), microbatch.num_tokens
                done.append(MicrobatchDone(jobs, tokens, found.num_rows, found.seconds))
            for step in completes.get(k, []):
                job = self._jobs[step[0]]
                if not (job.progress.diverged or step[0] in lost):
                    for segment, score in sorted(scores.pop(step), key=lambda pair: pair[0].index):
                        job.progress.add_score(segment, score)
                    done.append(count_step(job, rates[step], outcome.steps[step], ended_s[step]))
        return done

    def _step_ends(self, outcome: StagedOutcome) -> dict[tuple[str, int], float]:
        """When each step was done on all stages, in seconds of the run."""
        shift, found = self._timeline.now() - time.perf_counter(), dict.fromkeys(outcome.steps, 0.0)
        for span in outcome.spans:
            for job in span.args["jobs"] if span.name == "step" else ():
                step = (job, span.args["step"])
                found[step] = max(found[step], span.end_s + shift)
        return found

    def _record(self, outcome: StagedOutcome, begun_s: float) -> None:
        """Puts what ran on the stages into the timeline; the wall clock counts the program once."""
        shift = self._timeline.now() - time.perf_counter()
        for span in outcome.spans:
            self._timeline.spans.append(dataclasses.replace(span, start_s=span.start_s + shift))
        ended_s = time.perf_counter()
        self._timeline.wall.add(Activity.COMPUTING, ended_s - begun_s, ended_s)
