"""Trains a sweep: one engine, as many trials at a time as there are slots, a new one as soon as one ends.

ask a point → its job takes a slot → its values are seen as it trains → early stopping judges → it ends, is stopped or
fails → the sampler is told → the next. A killed sweep goes on where it was: trials that ended are not trained again,
the others go on from their checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from weft.engine.events import (
    EvalDone,
    Event,
    JobEnded,
    JobEvent,
    JobFailed,
    JobPaused,
    JobPreempted,
    JobResumed,
    JobStarted,
    JobSucceeded,
    JobWaiting,
    JobWarning,
    StepDone,
)
from weft.engine.execute.protocol import ReplicaFaultError, ReplicaMemoryError
from weft.engine.resume import job_settings
from weft.errors import StorageError, WeftError
from weft.objectives.metrics import MeanScores
from weft.sweeps.configure import configuration_error
from weft.sweeps.context import SweepContext
from weft.sweeps.decide.decisions import Decisions
from weft.sweeps.ledger import Ledger, OnNews
from weft.sweeps.record.leaderboard import read_losses
from weft.sweeps.record.trials_file import Trial, TrialState
from weft.sweeps.search.samplers import num_planned
from weft.sweeps.trial_time import TrialTime
from weft.wall_clock import Activity


class SweepRun:
    """A sweep while it trains."""

    def __init__(self, context: SweepContext, on_news: OnNews = lambda kind, trial, text: None) -> None:
        self.context = context
        self.ledger = Ledger(context, on_news)
        self.trial_time = TrialTime(context.engine.timeline)
        """Whose time it was."""
        self._decisions = Decisions(context, self.ledger, self._begin, self._see)
        self._best_look: dict[str, MeanScores] = {}
        """Of each trial, the evaluation with the smallest loss: that of its weights where patience ends it."""
        self._unstarted: set[str] = set()
        """Trials that have been begun in this session and do not train yet."""
        self._obstacle: str | None = None
        """Why a trial cannot go on although nobody asked it to stop."""

    @property
    def trials(self) -> list[Trial]:
        """In the order they were tried."""
        return self.ledger.trials

    @property
    def num_planned(self) -> int | None:
        """Trials there will be, as far as that is known."""
        return num_planned(self.context.spec, self.context.space)

    @property
    def is_out_of_time(self) -> bool:
        """Whether what the sweep may take, start-up included, is used up."""
        most = self.context.spec.max_seconds
        return most is not None and self.ledger.seconds + self.context.startup_s >= most

    def train(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Trains until the space or the budget is used up, or until asked to stop; then every trial is saved."""
        try:
            self._train(should_stop)
        finally:
            self.context.engine.finish_files()
        self.ledger.write(at_once=True)
        if self._obstacle is not None:
            raise StorageError(f"{self._obstacle} Free some space and go on with --resume.")

    def _train(self, should_stop: Callable[[], bool]) -> None:
        self.ledger.restore()
        for trial in self.trials:
            if not trial.state.is_final:
                self._begin(trial)
        self._decisions.start()
        is_stopped, num_decided = False, -1
        # Trials that wait for each other go on once what they wait for is decided.
        while num_decided < self._decisions.num_decided and not is_stopped:
            num_decided = self._decisions.num_decided
            for event in self.context.engine.events():
                self._hear(event)
                if should_stop():
                    is_stopped = True
                    self.context.engine.stop()

    def _begin(self, trial: Trial) -> None:
        """Hands a trial to the engine, unless it cannot be trained or an earlier sweep has trained it."""
        configurations = self.context.configurations
        try:
            job = configurations.job(trial.name, trial.params)
            trial.total_steps = configurations.num_steps(job)
        except ReplicaFaultError:
            raise
        except WeftError as error:
            self.ledger.add(trial)
            self.ledger.end(trial, TrialState.FAILED, configuration_error(error, trial.params))
            return
        self.ledger.add(trial)
        found = self.context.previous.same_as(job) if self.context.previous is not None else None
        if found is not None:
            self.ledger.take_over(trial, *found)
            return
        try:
            self.context.directory.write_job(trial.name, job_settings(job))
            self.context.engine.submit(job, configurations.data(job), base_dir=self.context.base_dir)
            self._unstarted.add(trial.name)
        except (StorageError, ReplicaFaultError):
            raise
        except WeftError as error:
            self.ledger.end(trial, TrialState.FAILED, configuration_error(error, trial.params))

    def _hear(self, event: Event) -> None:
        """Takes note of what the engine did, and does what follows from it."""
        self.trial_time.catch_up(self.ledger.by_name)
        self.context.trackers.record(event)
        if isinstance(event, JobWarning):
            self._hear_warning(event)
            return
        trial = self.ledger.by_name.get(event.job) if isinstance(event, JobEvent) else None
        if trial is None:
            return
        elif isinstance(event, JobEnded):
            self._hear_end(trial, event)
        elif trial.state.is_final:
            # It was stopped a moment ago; the engine is about to notice.
            return
        elif isinstance(event, JobStarted):
            self._hear_start(trial, event)
        elif isinstance(event, StepDone):
            trial.steps, trial.tokens = event.step, event.num_tokens
            if math.isfinite(event.loss):
                trial.losses.append((event.step, event.loss))
            self.ledger.tell_news("step", trial, "")
        elif isinstance(event, EvalDone):
            looked = MeanScores(event.eval_loss, event.eval_mean_token_accuracy)
            if event.is_best:
                self._best_look[trial.name] = looked
            self._see(trial, looked)
        elif isinstance(event, JobWaiting | JobPreempted | JobResumed):
            self._decisions.note_room(trial, event.step, has_room=isinstance(event, JobResumed))
        elif isinstance(event, JobPaused) and not event.is_asked_for:
            self._obstacle = f"{trial.name}: {event.reason}"
        self._check_seconds()
        self._decisions.catch_up()
        self.ledger.write(at_once=False)

    def _check_seconds(self) -> None:
        """Ends the sweep once its time is used up, start-up included; not before all are where they were left."""
        is_whole = not any(t.name in self._unstarted and t.points and t.held_step is None for t in self.trials)
        if is_whole and self.is_out_of_time:
            self._decisions.cut_all(f"the budget of {self.context.spec.max_seconds:g} s was used up")

    def _hear_warning(self, event: JobWarning) -> None:
        """Tells a warning, with its trial where it concerns one alone."""
        trial = self.ledger.by_name.get(event.jobs[0]) if len(event.jobs) == 1 else None
        self.ledger.tell_news("warning", trial, event.message)

    def _hear_start(self, trial: Trial, event: JobStarted) -> None:
        trial.state, trial.steps, trial.total_steps = TrialState.TRAINING, event.step, event.num_steps
        known = {step: loss for step, loss in trial.losses if step <= event.step}
        if event.step > max(known, default=0):
            # Steps of a replica that ended before it could tell of them.
            written = read_losses(self.context.directory, trial.name)
            known |= {step: loss for step, loss in written if step <= event.step}
        trial.losses = sorted(known.items())
        trial.tokens = self.context.engine.jobs[trial.name].num_tokens
        if trial.started_s is None:
            trial.started_s = self.ledger.seconds
        self._unstarted.discard(trial.name)
        self._decisions.note_room(trial, event.step, has_room=True)
        self.ledger.tell_news("started", trial, "")

    def _hear_end(self, trial: Trial, event: JobEnded) -> None:
        job = self.context.engine.jobs[trial.name]
        if trial.state.is_final:
            pass
        elif isinstance(event, JobFailed):
            self.ledger.end(
                trial, TrialState.FAILED, event.reason.text, tick=self._decisions.end_tick(trial, trial.steps)
            )
        elif isinstance(event, JobSucceeded):
            if job.has_best or not trial.points:
                # Its weights are not those that were last seen: patience ran out, or nothing was there to evaluate.
                self._see(trial, self._best_look.get(trial.name))
            if not trial.state.is_final:
                self.ledger.end(trial, TrialState.DONE, "", tick=self._decisions.end_tick(trial, trial.steps))
                self.ledger.keep_best()
        self.context.engine.forget(trial.name)
        self._unstarted.discard(trial.name)
        self._decisions.note_end(trial)

    def _see(self, trial: Trial, looked: MeanScores | None) -> None:
        """Looks at the objective of a trial; one that has no value fails. Without an evaluation, it is made."""
        context = self.context
        job = context.engine.jobs[trial.name]
        judged = context.directory.job_dir(trial.name) / "judged"
        try:
            with context.engine.timeline.wall.spending(Activity.EVALUATING):
                value = context.objective.value(context.engine, job, looked, judged)
            reason = f"its {context.objective.metric} at step {job.step} is {value}"
        except (StorageError, ReplicaFaultError):
            raise
        except ReplicaMemoryError:
            value, reason = math.nan, "the GPU ran out of memory while it was judged; lower capacity or max_jobs."
        except WeftError as error:
            value, reason = math.nan, str(error)
        if math.isfinite(value):
            self.ledger.see(trial, job.step, job.num_tokens, value)
            return
        self.ledger.end(trial, TrialState.FAILED, reason, tick=self._decisions.end_tick(trial, job.step))
        self._decisions.note_end(trial)
        if not job.state.is_final:
            context.engine.cancel(trial.name)
