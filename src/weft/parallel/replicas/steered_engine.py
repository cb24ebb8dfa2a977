"""An engine over many ranks whose jobs are controlled while they train: held, queried, paused and cancelled.

A rank reports an evaluation and waits until it is processed. So a decision about it finds the job as it was, and no
checkpoint is ahead of the decisions. A query goes to the rank that has the job; a job without a rank is first restored
to where it was.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.engine.events import EvalDone, Event, JobCancelled
from weft.errors import JobError
from weft.job_state import JobState
from weft.objectives.objective import MeanScores
from weft.parallel.replicas.messages import (
    AdapterChecked,
    AdapterQuery,
    AnswerQuery,
    CancelJob,
    CheckAdapter,
    ContinueJob,
    ForgetJob,
    HoldJob,
    JobQuery,
    QueryResult,
    Question,
    RankEvent,
    ScoreQuery,
    TrainJob,
)
from weft.parallel.replicas.records import JobRecord, RankRecord
from weft.parallel.replicas.replicated_engine import ReplicaInfo, ReplicatedEngine
from weft.spec import AdapterSpec

if TYPE_CHECKING:
    from weft.data.load import Prompt
    from weft.engine.inference.generate import Answer
    from weft.spec.sampling import Decoding


@dataclass(frozen=True)
class CheckingInfo(ReplicaInfo):
    """Facts that all replicas have in common, with a check of adapters."""

    find_problem: Callable[[AdapterSpec], Exception | None]
    _flaws: dict[str, Exception | None] = field(default_factory=dict)

    def check_adapter(self, adapter: AdapterSpec) -> None:
        if repr(adapter) not in self._flaws:
            self._flaws[repr(adapter)] = self.find_problem(adapter)
        flaw = self._flaws[repr(adapter)]
        if flaw is not None:
            raise flaw


class SweepReplicas(ReplicatedEngine):
    """Trains jobs on several replicas and answers queries about their current weights."""

    @functools.cached_property
    def executor(self) -> CheckingInfo:
        return CheckingInfo(self._ranks.first.facts, self._tokenizer, self._find_problem)

    @functools.cached_property
    def _standing(self) -> dict[tuple[str, int], RankRecord]:
        """Ranks that wait, by the job and the step of the evaluation they have reported."""
        return {}

    def hold(self, name: str, step: int) -> None:
        job = self.jobs[name]
        if job.hold_step != step:
            job.hold_step = step
            self._send_to(job, HoldJob(name, step))

    def hold_steps(self, name: str) -> None:
        job = self.jobs[name]
        if not job.has_started or job.state.is_final:
            return
        self._send_to(job, HoldJob(name, 0))
        job.hold_step = job.shown_step
        self._query(job, Question())
        job.hold_step = job.step

    def pause(self, name: str) -> None:
        job = self.jobs[name]
        job.is_parked = True
        if job.rank is None:
            job.rank_lost(job.step)
        elif not job.state.is_final:
            self._release(job)

    def resume(self, name: str) -> None:
        job = self.jobs[name]
        job.is_parked = False
        if job.state is JobState.PAUSED:
            job.state = JobState.QUEUED
        self._is_stale = True

    def cancel(self, name: str) -> None:
        job = self.jobs[name]
        if job.state.is_final:
            return
        job.is_cancelled = True
        if job.rank is None:
            self._end(job, JobCancelled(name, job.step))
        else:
            self._send_to(job, CancelJob(name))

    def forget(self, name: str) -> None:
        self._send_to(self.jobs.pop(name), ForgetJob(name))

    def evaluate(self, name: str) -> MeanScores:
        found: MeanScores = self._query(self.jobs[name], ScoreQuery())
        return found

    def answer(self, name: str, prompts: Sequence[Prompt], decoding: Decoding) -> list[Answer]:
        found: list[Answer] = self._query(self.jobs[name], AnswerQuery(prompts, decoding))
        return found

    def export_adapter(self, name: str, directory: Path | str) -> None:
        """Writes a job's adapter as a PEFT directory; its parent must exist."""
        self._query(self.jobs[name], AdapterQuery(Path(directory).absolute()))

    def _release_event(self, report: RankEvent) -> Iterator[Event]:
        yield from super()._release_event(report)
        event = report.event
        if isinstance(event, EvalDone):
            # Its reader has made all decisions about it.
            self._go_on(event)

    def _go_on(self, event: EvalDone) -> None:
        """Lets a rank continue that waits at an evaluation."""
        rank = self._standing.pop((event.job, event.step), None)
        if rank is not None:
            self._ranks.send(rank, ContinueJob(event.job, event.step))

    def _handle_event(self, rank: RankRecord, report: RankEvent) -> None:
        if isinstance(report.event, EvalDone):
            self._standing[report.event.job, report.event.step] = rank
        super()._handle_event(rank, report)

    def _send_to(self, job: JobRecord, command: HoldJob | CancelJob | ForgetJob) -> None:
        rank = self._rank_of(job)
        if rank is not None:
            self._ranks.send(rank, command)

    def _rank_of(self, job: JobRecord) -> RankRecord | None:
        return next((rank for rank in self._ranks if rank.index == job.rank), None)

    def _query(self, job: JobRecord, question: Question) -> Any:
        """Answer of the job's rank; raises its error. A job without a rank gets one first. A job that moves is queried
        on its new rank, and one whose rank ends on another."""
        is_ended = job.state.is_final
        while True:
            while job.is_leaving:
                self._receive_next()
            rank = self._rank_of(job) or self._restore_job(job)
            self._ranks.send(rank, JobQuery(job.name, question, job.shown_step, is_ended))
            answered = self._await_answer(rank, job)
            if answered is not None:
                break
        job.step, job.num_tokens = answered.step, answered.num_tokens
        if answered.error is not None:
            raise answered.error
        return answered.answer

    def _await_answer(self, rank: RankRecord, job: JobRecord) -> QueryResult | None:
        while job.rank == rank.index and rank in self._ranks:
            report = self._receive_next()
            if report is not None and report[0] is rank and isinstance(report[1], QueryResult):
                return report[1]
        return None

    def _restore_job(self, job: JobRecord) -> RankRecord:
        """Gives a job without a rank to one that has room and trains the job to its last known step."""
        while True:
            rank = self._least_loaded()
            if rank is not None and self._has_room(rank):
                break
            if len(self._ranks.loaded) == len(self._ranks):
                raise JobError("it has no replica, and none has room for it.", where=job.name)
            self._receive_next()
        job.rank = rank.index
        self._ranks.send(rank, TrainJob(job.order, None if job.state.is_final else job.shown_step))
        return rank

    def _has_room(self, rank: RankRecord) -> bool:
        limit = rank.replica(1.0).budget.max_jobs
        here = [job for job in self.jobs.values() if job.rank == rank.index and not job.state.is_final]
        return limit is None or len(here) < limit

    def _find_problem(self, adapter: AdapterSpec) -> Exception | None:
        return self._call_any(CheckAdapter(adapter), AdapterChecked).error
