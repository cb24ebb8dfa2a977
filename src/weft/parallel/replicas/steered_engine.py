"""An engine over many ranks whose jobs are steered while they train: held, asked, put aside and taken off.

A rank tells of an evaluation and stands still until it has been heard. So whoever decides something because of it finds
the job as it was, and no checkpoint is ahead of what has been decided. What is asked of a job is asked where it is; one
that is nowhere is brought back to where it stood first.
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
from weft.objectives.metrics import MeanScores
from weft.parallel.replicas.known_job import JobRecord
from weft.parallel.replicas.known_rank import RankRecord
from weft.parallel.replicas.messages import (
    AdapterChecked,
    CancelJob,
    CheckAdapter,
    ContinueJob,
    ForgetJob,
    HoldJob,
    JobQuery,
    QueryResult,
    RankEvent,
    TrainJob,
)
from weft.parallel.replicas.questions import AdapterQuery, AnswerQuery, Question, ScoreQuery
from weft.parallel.replicas.replicated_engine import ReplicaInfo, ReplicatedEngine
from weft.spec import AdapterSpec

if TYPE_CHECKING:
    from weft.data.prompts import Prompt
    from weft.engine.inference.answers import Answer
    from weft.engine.inference.generate import Decoding


@dataclass(frozen=True)
class CheckingInfo(ReplicaInfo):
    """What all replicas have in common, and which adapters fit."""

    find_problem: Callable[[AdapterSpec], Exception | None]
    _flaws: dict[str, Exception | None] = field(default_factory=dict)
    """What has been asked."""

    def check_adapter(self, adapter: AdapterSpec) -> None:
        """ConfigError for an adapter that the backbone cannot have."""
        if repr(adapter) not in self._flaws:
            self._flaws[repr(adapter)] = self.find_problem(adapter)
        flaw = self._flaws[repr(adapter)]
        if flaw is not None:
            raise flaw


class SweepReplicas(ReplicatedEngine):
    """Trains jobs on several replicas; what is asked of a job is of its weights as they are at that moment."""

    @functools.cached_property
    def executor(self) -> CheckingInfo:
        """What all replicas have in common, and which adapters fit."""
        return CheckingInfo(self._ranks.first.facts, self._tokenizer, self._find_problem)

    @functools.cached_property
    def _standing(self) -> dict[tuple[str, int], RankRecord]:
        """Ranks that stand still, by the job and the step of the evaluation they have told of."""
        return {}

    def hold(self, name: str, step: int) -> None:
        """Lets a job take no step beyond this one for now; it keeps its place."""
        job = self.jobs[name]
        if job.hold_step != step:
            job.hold_step = step
            self._send_to(job, HoldJob(name, step))

    def hold_steps(self, name: str) -> None:
        """Lets a job take no further step; `jobs` knows where it stands then."""
        job = self.jobs[name]
        if not job.has_started or job.state.is_final:
            return
        self._send_to(job, HoldJob(name, 0))
        job.hold_step = job.shown_step
        self._ask(job, Question())
        job.hold_step = job.step

    def pause(self, name: str) -> None:
        """Lets a job wait without a place: it is saved, and no rank has it."""
        job = self.jobs[name]
        job.is_parked = True
        if job.rank is None:
            job.rank_lost(job.step)
        elif not job.state.is_final:
            self._release(job)

    def resume(self, name: str) -> None:
        """Lets a paused job go on."""
        job = self.jobs[name]
        job.is_parked = False
        if job.state is JobState.PAUSED:
            job.state = JobState.QUEUED
        self._is_stale = True

    def cancel(self, name: str) -> None:
        """Takes a job off for good."""
        job = self.jobs[name]
        if job.state.is_final:
            return
        job.is_cancelled = True
        if job.rank is None:
            self._end(job, JobCancelled(name, job.step))
        else:
            self._send_to(job, CancelJob(name))

    def forget(self, name: str) -> None:
        """Lets go of a job that has ended; what is on disk stays."""
        self._send_to(self.jobs.pop(name), ForgetJob(name))

    def evaluate(self, name: str) -> MeanScores:
        """How a job does on its evaluation data."""
        found: MeanScores = self._ask(self.jobs[name], ScoreQuery())
        return found

    def answer(self, name: str, prompts: Sequence[Prompt], decoding: Decoding) -> list[Answer]:
        """What a job answers to prompts."""
        found: list[Answer] = self._ask(self.jobs[name], AnswerQuery(prompts, decoding))
        return found

    def export_adapter(self, name: str, directory: Path | str) -> None:
        """Writes a job's adapter as a PEFT directory; its parent must exist."""
        self._ask(self.jobs[name], AdapterQuery(Path(directory).absolute()))

    def _tell(self, told: RankEvent) -> Iterator[Event]:
        yield from super()._tell(told)
        event = told.event
        if isinstance(event, EvalDone):
            # All that follows from it has been decided.
            rank = self._standing.pop((event.job, event.step), None)
            if rank is not None:
                self._ranks.send(rank, ContinueJob(event.job, event.step))

    def _handle_event(self, rank: RankRecord, told: RankEvent) -> None:
        if isinstance(told.event, EvalDone):
            self._standing[told.event.job, told.event.step] = rank
        super()._handle_event(rank, told)

    def _send_to(self, job: JobRecord, command: HoldJob | CancelJob | ForgetJob) -> None:
        """Tells the rank that has a job, if one has."""
        rank = self._rank_of(job)
        if rank is not None:
            self._ranks.send(rank, command)

    def _rank_of(self, job: JobRecord) -> RankRecord | None:
        """The rank that has a job, if one has."""
        return next((rank for rank in self._ranks if rank.index == job.rank), None)

    def _ask(self, job: JobRecord, question: Question) -> Any:
        """What the rank that has the job answers; raises what it raised. A job that is nowhere is brought back first.

        A job that moves is asked where it comes to, and one whose rank ends is asked on another.
        """
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
        """None if the job is gone from the rank before."""
        while job.rank == rank.index and rank in self._ranks:
            told = self._receive_next()
            if told is not None and told[0] is rank and isinstance(told[1], QueryResult):
                return told[1]
        return None

    def _restore_job(self, job: JobRecord) -> RankRecord:
        """Gives a job that no rank has to one with room, which trains it to where it was last seen."""
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
