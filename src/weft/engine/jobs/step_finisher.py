"""Does what is due after a step has been reported: metrics, evaluation, checkpoint, and the end of the job."""

from __future__ import annotations

from collections.abc import Iterator

from weft.engine.events import CheckpointSaved, EvalDone, Event, JobWarning
from weft.engine.execute.protocol import ReplicaFaultError, ReplicaMemoryError
from weft.engine.jobs.evaluations import Evaluations
from weft.engine.jobs.lifecycle import Lifecycle
from weft.engine.jobs.live_job import LiveJob
from weft.engine.recorder import FileKind, JobFile
from weft.errors import StorageError
from weft.job_state import JobState, Reason


class StepFinisher:
    def __init__(self, lifecycle: Lifecycle) -> None:
        self._jobs = lifecycle
        self._transitions = lifecycle.transitions
        self._executor = lifecycle.executor
        self._keeper = lifecycle.keeper
        self._timeline = lifecycle.timeline
        self.evaluations = Evaluations(lifecycle)

    def finish_step(self, job: LiveJob) -> Iterator[Event]:
        """Does what is due after a job's last step: metrics, evaluation, checkpoint, and its end.

        Files are only started here; `receive` returns their outcome. A long evaluation is only begun: the job does not
        train until `evaluations` has finished it and this is called again. A full disk pauses the job; once resumed, it
        continues with what was not done.
        """
        if job.progress.diverged:
            yield from self._transitions.fail(job, job.progress.diverged)
            return
        has_room, failure = True, None
        # Read once: a checkpoint that becomes due meanwhile would not be waited for.
        own_s = self._timeline.own_s()
        try:
            self._keeper.flush(job)
            if job.is_eval_due():
                if not (job.is_evaluated or job.is_evaluating):
                    self.evaluations.open(job)
                    yield from self.evaluations.run_slice()
                if not job.is_evaluated:
                    return
                yield self._report_evaluation(job)
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
                job.finished.last = job.step
        except StorageError as error:
            # The weights in memory are good; only writing failed, and other jobs may write elsewhere.
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
            # The step is not finished, so the evaluation is tried again.
            yield from self._jobs.free_memory([job.name])

    def receive(self, *, wait: bool = False) -> list[Event]:
        """Applies the outcome of finished writes; with `wait` also of the oldest one under way. Returns all events at
        once, so that a caller who stops reading leaves no half of them."""
        events: list[Event] = []
        for file in self._keeper.files.wait_for_one() if wait else self._keeper.files.ended():
            self._timeline.add("write", file.ended_s - file.started_s, file.ended_s, jobs={file.job.name: 0})
            events += self._received(file)
        return events

    def _received(self, file: JobFile) -> list[Event]:
        job, error = file.job, file.error
        if file.kind is FileKind.EXPORT:
            message = f"there is no adapter of step {file.step}: {error}"
            return [] if error is None else [JobWarning((job.name,), message)]
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
            job.finished.checkpoint_is_overdue = file.kind is FileKind.CHECKPOINT
            return self._could_not_write(job, failure)
        except ReplicaFaultError:
            raise
        except Exception as failure:
            return self._jobs.blame(job, failure)

    def _could_not_write(self, job: LiveJob, error: StorageError) -> list[Event]:
        job.finished.last = -1
        return self._transitions.pause([job], Reason.of(error), save=False)

    def _start_checkpoint(self, job: LiveJob) -> None:
        with self._timeline.span("checkpoint", jobs={job.name: 0}):
            self._keeper.start_checkpoint(job, self._timeline.now())
        finished = job.finished
        finished.saved, finished.saved_s, finished.checkpoint_is_overdue = job.step, self._timeline.own_s(), False

    def _finish(self, job: LiveJob) -> Iterator[Event]:
        """Starts to write the adapter of a job that has done all its steps; the job ends once it is written."""
        with self._timeline.span("adapter", jobs={job.name: 0}):
            is_kept = self._keeper.start_adapter(job)
        job.finished.last = job.step
        if is_kept:
            yield from self.receive()
        else:
            self._executor.use_best(job.name)
            yield from self._transitions.succeed(job, None)

    def _report_evaluation(self, job: LiveJob) -> Event:
        pending, progress = job.finished.pending_eval, job.progress
        assert pending is not None
        is_best = progress.is_best(pending.means.loss)
        if is_best and job.spec.early_stopping_patience is not None:
            # First: without the memory for it nothing has changed, and the evaluation is noted again.
            self._executor.keep_best(job.name)
        progress.record_eval(pending.means.loss)
        job.finished.evaluated, job.finished.pending_eval = job.step, None
        event = EvalDone(
            job.name,
            step=job.step,
            epoch=progress.epoch,
            eval_loss=pending.means.loss,
            eval_mean_token_accuracy=pending.means.accuracy,
            eval_runtime=pending.seconds,
            is_best=is_best,
            seconds=self._timeline.now(),
            metrics={f"eval_{name}": value for name, value in pending.means.further.items()},
        )
        self._keeper.note_eval(job, event)
        return event
