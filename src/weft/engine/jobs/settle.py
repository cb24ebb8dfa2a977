"""Does what is due after a step has been told: metrics, evaluation, checkpoint, and the end of the job."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from weft.engine.events import CheckpointSaved, EvalDone, Event, JobWarning
from weft.engine.execute.protocol import EvaluationWork, ReplicaFaultError, ReplicaMemoryError
from weft.engine.job_files import FileKind, JobFile
from weft.engine.jobs.lifecycle import Lifecycle
from weft.engine.jobs.live_job import EvalResult, LiveJob
from weft.errors import StorageError
from weft.job_state import JobState, Reason


class StepFinisher:
    """Settles the steps of jobs, one at a time."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._jobs = lifecycle
        self._transitions = lifecycle.transitions
        self._executor = lifecycle.executor
        self._keeper = lifecycle.keeper
        self._timeline = lifecycle.timeline

    def settle(self, job: LiveJob) -> Iterator[Event]:
        """Does what the last step left to do: metrics, evaluation, checkpoint, and the end of the job.

        Files are only begun here; `receive` tells what became of them. A disk that is full pauses the job; once
        resumed, it goes on with what was not done.
        """
        if job.progress.diverged:
            yield from self._transitions.fail(job, job.progress.diverged)
            return
        has_room, failure = True, None
        # Read once: a checkpoint that falls due while the others are done would not be waited for.
        own_s = self._timeline.own_s()
        try:
            self._keeper.flush(job)
            if job.is_eval_due():
                yield self._evaluate(job)
                self._keeper.flush(job)
            is_complete = job.progress.is_complete
            if is_complete:
                self._transitions.close(job)
            if job.is_save_due(own_s):
                self._start_checkpoint(job)
                yield from self.receive()
            if is_complete and job.status.is_closing:
                yield from self._finish(job)
            elif job.is_running:
                job.settled.last = job.step
        except StorageError as error:
            # The weights in memory are good; what cannot go on is writing. The neighbours may write elsewhere.
            yield from self._could_not_write(job, error)
        except ReplicaMemoryError:
            has_room = False
        except ReplicaFaultError:
            raise
        except Exception as error:
            failure = error
        if failure is not None:
            yield from self._jobs.blame(job, failure)
        if not has_room:
            # The job is not settled, so the evaluation is tried again.
            yield from self._jobs.free_memory([job.name])

    def receive(self, *, wait: bool = False) -> list[Event]:
        """Does what follows from what has been written by now; with `wait` also from the oldest that is under way.

        All of it, so that a reader who leaves does not leave half of it behind.
        """
        events: list[Event] = []
        for file in self._keeper.files.wait_for_one() if wait else self._keeper.files.ended():
            self._timeline.add("write", file.ended_s - file.started_s, file.ended_s, jobs={file.job.name: 0})
            events += self._received(file)
        return events

    def _received(self, file: JobFile) -> list[Event]:
        job, error = file.job, file.error
        if file.kind is FileKind.EXPORT:
            said = f"there is no adapter of step {file.step}: {error}"
            return [] if error is None else [JobWarning((job.name,), said)]
        if job.state is not JobState.RUNNING:
            # Paused in the meantime, and saved at a later step.
            return []
        try:
            if error is not None:
                raise error
            if file.kind is FileKind.ADAPTER:
                self._executor.use_best(job.name)
                return self._transitions.succeed(job, str(file.directory))
            self._keeper.write_status(job, self._timeline.now())
            self._keeper.note_time()
            return [CheckpointSaved(job.name, file.step)]
        except StorageError as failure:
            job.settled.checkpoint_is_overdue = file.kind is FileKind.CHECKPOINT
            return self._could_not_write(job, failure)
        except ReplicaFaultError:
            raise
        except Exception as failure:
            return self._jobs.blame(job, failure)

    def _could_not_write(self, job: LiveJob, error: StorageError) -> list[Event]:
        job.settled.last = -1
        return self._transitions.pause([job], Reason.of(error), save=False)

    def _start_checkpoint(self, job: LiveJob) -> None:
        """Begins a checkpoint; on a CPU it is there when this returns."""
        with self._timeline.span("checkpoint", jobs={job.name: 0}):
            self._keeper.start_checkpoint(job, self._timeline.now())
        settled = job.settled
        settled.saved, settled.saved_s, settled.checkpoint_is_overdue = job.step, self._timeline.own_s(), False

    def _finish(self, job: LiveJob) -> Iterator[Event]:
        """Begins to write the adapter of a job that has done all its steps; it ends once that is there."""
        with self._timeline.span("adapter", jobs={job.name: 0}):
            is_kept = self._keeper.start_adapter(job)
        job.settled.last = job.step
        if is_kept:
            yield from self.receive()
        else:
            self._executor.use_best(job.name)
            yield from self._transitions.succeed(job, None)

    def _evaluate(self, job: LiveJob) -> Event:
        """The evaluation of one job; all others that are due by now are done with it and told when it is their turn."""
        if not job.is_evaluated:
            others = [other for other in self._jobs.running() if other is not job and not other.is_settled]
            due = [
                other for other in others if other.is_eval_due() and not (other.is_evaluated or other.progress.diverged)
            ]
            try:
                self._look_at([job, *due])
            except (ReplicaMemoryError, ReplicaFaultError):
                raise
            except Exception:
                if not due:
                    raise
                # An evaluation changes no job; alone, it tells whether it is this one that cannot be evaluated.
                self._look_at([job])
        looked, progress = job.settled.untold, job.progress
        assert looked is not None
        is_best = progress.is_best(looked.means.loss)
        if is_best and job.spec.early_stopping_patience is not None:
            # First: without the memory for it nothing has changed, and the evaluation is noted again.
            self._executor.keep_best(job.name)
        progress.record_eval(looked.means.loss)
        job.settled.evaluated, job.settled.untold = job.step, None
        event = EvalDone(
            job.name,
            step=job.step,
            epoch=progress.epoch,
            eval_loss=looked.means.loss,
            eval_mean_token_accuracy=looked.means.accuracy,
            eval_runtime=looked.seconds,
            is_best=is_best,
            seconds=self._timeline.now(),
            metrics={f"eval_{name}": value for name, value in looked.means.further.items()},
        )
        self._keeper.note_eval(job, event)
        return event

    def _look_at(self, jobs: Sequence[LiveJob]) -> None:
        """Evaluates jobs at their last step in the same microbatches; each keeps its result until that is told."""
        tokens = {job.name: job.data.eval.summary.num_tokens for job in jobs if job.data.eval is not None}
        assert len(tokens) == len(jobs), "only jobs with evaluation data are due"
        self._transitions.land()
        room, executor = self._jobs.room, self._executor
        work = EvaluationWork(tuple(tokens), room.capacity, room.row_tile)
        compiled_s = executor.compiling_s()
        ticket = executor.start(work)
        compiled_s, started_s = executor.compiling_s() - compiled_s, time.perf_counter()
        found = executor.wait(ticket)
        seconds = found.seconds
        if compiled_s:
            # The device had nothing to do meanwhile.
            self._timeline.add("compile", compiled_s, started_s)
            seconds = max(0.0, min(seconds, found.ended_s - started_s))
        self._timeline.add("eval", seconds, found.ended_s, jobs=tokens)
        total = max(sum(tokens.values()), 1)
        for job, means in zip(jobs, found.means, strict=True):
            job.settled.untold = EvalResult(job.step, means, seconds * tokens[job.name] / total)
