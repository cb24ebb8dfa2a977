"""Evaluations in slices, so that none holds up other jobs, commands or prompts for long.

Jobs whose evaluations fall due together are evaluated in the same microbatches and wait for each other; other jobs
train between the slices. A slice continues the sums of the one before, so slicing changes no bit. An evaluation of a
job that is paused, or of a replica that runs out of memory, starts again; nothing of it is recorded before its end.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.engine.events import EvalSliceDone, Event
from weft.engine.execute.protocol import (
    EvaluatedPart,
    EvaluationOutcome,
    EvaluationWork,
    ReplicaFaultError,
    ReplicaMemoryError,
)
from weft.engine.jobs.lifecycle import Lifecycle
from weft.engine.jobs.live_job import EvalResult, LiveJob

LOG = logging.getLogger("weft.engine")
SLICE_MICROBATCHES = 4
"""Microbatches of a slice, forward only: about as long as training one and a third."""


@dataclass
class OpenEvaluation:
    """Jobs that are evaluated together, and the parts done so far."""

    jobs: list[LiveJob]
    conditions: tuple[int, int]
    """Capacity and row tile, which decide bits; the evaluation starts again when they change."""
    parts: dict[str, EvaluatedPart] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def unfinished(self) -> list[LiveJob]:
        return [job for job in self.jobs if self.part(job).num_groups < _num_groups(job)]

    def part(self, job: LiveJob) -> EvaluatedPart:
        return self.parts.get(job.name, EvaluatedPart())


class Evaluations:
    def __init__(self, lifecycle: Lifecycle) -> None:
        self._jobs = lifecycle
        self._executor = lifecycle.executor
        self._timeline = lifecycle.timeline
        self._open: deque[OpenEvaluation] = deque()
        """Open evaluations; the next slice belongs to the first one."""

    @property
    def is_open(self) -> bool:
        return bool(self._open)

    def open(self, job: LiveJob) -> None:
        """Opens the evaluation of a job at its last step, with those of all others that are due now."""
        others = [other for other in self._jobs.running() if other is not job and not other.is_step_finished]
        due = [other for other in others if other.is_eval_due() and not other.progress.diverged]
        self._begin([job, *(other for other in due if not (other.is_evaluated or other.is_evaluating))])

    def run_slice(self) -> list[Event]:
        """Runs the next slice, if any; an error ends no other job's evaluation."""
        evaluation = self._next()
        if evaluation is None:
            return []
        jobs = evaluation.unfinished()
        failure: Exception | None = None
        try:
            return self._run(evaluation, jobs)
        except ReplicaFaultError:
            raise
        except ReplicaMemoryError:
            pass
        except Exception as error:
            failure = error
        # Not in a handler, which would hold on to the tensors of what failed.
        self._drop(evaluation)
        if failure is None:
            return self._jobs.free_memory([job.name for job in jobs])
        if len(jobs) == 1:
            return self._jobs.blame(jobs[0], failure)
        # An evaluation changes no job; alone, each shows whether it is the one that cannot be evaluated.
        LOG.warning("evaluating several jobs failed; each is evaluated alone", exc_info=failure)
        for job in evaluation.jobs:
            self._begin([job])
        return []

    def _begin(self, jobs: list[LiveJob]) -> None:
        assert all(job.data.eval is not None for job in jobs), "only jobs with evaluation data are due"
        for job in jobs:
            job.finished.evaluating = job.step
        self._open.appendleft(OpenEvaluation(jobs, self._conditions))

    @property
    def _conditions(self) -> tuple[int, int]:
        return self._jobs.room.capacity, self._jobs.room.row_tile

    def _next(self) -> OpenEvaluation | None:
        while self._open:
            evaluation = self._open[0]
            for job in evaluation.jobs:
                if not job.is_evaluating or self._jobs.jobs.get(job.name) is not job:
                    job.finished.evaluating = None
            evaluation.jobs = [job for job in evaluation.jobs if job.is_evaluating]
            if evaluation.conditions != self._conditions:
                self._open[0] = evaluation = OpenEvaluation(evaluation.jobs, self._conditions)
            if evaluation.unfinished():
                return evaluation
            self._finish(evaluation)
        return None

    def _drop(self, evaluation: OpenEvaluation) -> None:
        self._open.remove(evaluation)
        for job in evaluation.jobs:
            job.finished.evaluating = None

    def _finish(self, evaluation: OpenEvaluation) -> None:
        """Stores the results in the jobs, which report them."""
        self._drop(evaluation)
        for job in evaluation.jobs:
            means = evaluation.part(job).means
            job.finished.pending_eval = EvalResult(job.step, means, evaluation.seconds.get(job.name, 0.0))

    def _run(self, evaluation: OpenEvaluation, jobs: Sequence[LiveJob]) -> list[Event]:
        self._jobs.transitions.sync_progress()
        names = tuple(job.name for job in jobs)
        work = EvaluationWork(names, *evaluation.conditions, dict(evaluation.parts), SLICE_MICROBATCHES)
        outcome, seconds = self._measured(work)
        tokens = {
            job.name: _num_tokens(job, evaluation.part(job).num_groups, part.num_groups)
            for job, part in zip(jobs, outcome.parts, strict=True)
        }
        evaluation.parts.update(zip(names, outcome.parts, strict=True))
        self._timeline.add("eval", seconds, outcome.ended_s, jobs={name: num for name, num in tokens.items() if num})
        total = sum(tokens.values())
        for job in jobs:
            share = seconds * tokens[job.name] / max(total, 1)
            evaluation.seconds[job.name] = evaluation.seconds.get(job.name, 0.0) + share
            job.evaluated_tokens += tokens[job.name]
        if not evaluation.unfinished():
            self._finish(evaluation)
            return []
        self._open.rotate(-1)
        return [EvalSliceDone(tuple(name for name, num in tokens.items() if num), total, seconds)]

    def _measured(self, work: EvaluationWork) -> tuple[EvaluationOutcome, float]:
        """Runs a slice; also returns its seconds without those in which kernels were compiled."""
        compiled_s = self._executor.compiling_s()
        ticket = self._executor.start(work)
        compiled_s, started_s = self._executor.compiling_s() - compiled_s, time.perf_counter()
        outcome = self._executor.wait(ticket)
        if not compiled_s:
            return outcome, outcome.seconds
        # The device had nothing to do meanwhile.
        self._timeline.add("compile", compiled_s, started_s)
        return outcome, max(0.0, min(outcome.seconds, outcome.ended_s - started_s))


def _num_groups(job: LiveJob) -> int:
    return 0 if job.data.eval is None else job.data.eval.num_groups


def _num_tokens(job: LiveJob, start: int, end: int) -> int:
    return 0 if job.data.eval is None else int(job.data.eval.group_tokens[start:end].sum())
