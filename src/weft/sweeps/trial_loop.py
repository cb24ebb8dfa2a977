"""Trains a sweep: one engine, as many trials at a time as there are slots, a new one as soon as one ends.

ask a point → its job takes a slot → its values are seen as it trains → early stopping judges → it ends, is stopped or
fails → the sampler is told → the next. A killed sweep goes on where it was: trials that ended are not trained again,
the others go on from their checkpoints.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from weft.engine.events import (
    EvalDone,
    Event,
    JobEnded,
    JobEvent,
    JobFailed,
    JobPaused,
    JobStarted,
    JobSucceeded,
    JobWarning,
    StepDone,
)
from weft.engine.train import job_settings
from weft.errors import StorageError, WeftError
from weft.execute.protocol import ReplicaMemoryError
from weft.objectives.metrics import MeanScores
from weft.spec.space import params_of
from weft.sweeps.configure import configuration_error
from weft.sweeps.context import SweepContext
from weft.sweeps.ledger import Ledger, OnNews
from weft.sweeps.record.trial import Trial, TrialState, trial_name
from weft.sweeps.search.early_stop import EarlyStop
from weft.sweeps.search.samplers import num_planned
from weft.sweeps.start_order import BLIND, longest_first
from weft.sweeps.trial_time import TrialTime

AT_A_TIME = 32
"""Trials that train together unless max_jobs says otherwise."""
AT_A_TIME_ADAPTIVE = 8
"""The same for samplers that learn from values: with more under way they would choose blindly."""


class SweepRun:
    """A sweep while it trains."""

    def __init__(self, context: SweepContext, on_news: OnNews = lambda kind, trial, text: None) -> None:
        self.context = context
        self.ledger = Ledger(context, on_news)
        self.trial_time = TrialTime(context.engine.timeline)
        """Whose time it was."""
        self._rules = EarlyStop(context.spec.early_stop, context.objective.metric, context.objective.is_max)
        self._held: set[str] = set()
        """Trials that wait at a rung."""
        self._is_closed = False
        """No more trials are asked for."""
        self._best_look: dict[str, MeanScores] = {}
        """Of each trial, the evaluation with the smallest loss: that of its weights where patience ends it."""
        self._upcoming: deque[Trial] | None = None
        """The trials to come, if they are known."""
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

    def train(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Trains until the space or the budget is used up, or until asked to stop; then every trial is saved."""
        self.ledger.restore()
        for trial in self.trials:
            if not trial.state.is_final:
                self._begin(trial)
        self._upcoming = longest_first(self.context, self.ledger)
        self._refill()
        for event in self.context.engine.events():
            self._hear(event)
            if should_stop():
                self.context.engine.stop()
        self.ledger.write(at_once=True)
        if self._obstacle is not None:
            raise StorageError(f"{self._obstacle} Free some space and go on with --resume.")

    def _refill(self) -> None:
        """Starts new trials while there are slots and points for them."""
        blind = self.context.sampler_name in (*BLIND, "qmc")
        slots = self.context.spec.max_jobs or (AT_A_TIME if blind else AT_A_TIME_ADAPTIVE)
        while not self._is_closed and self._num_active() < slots:
            trial = self._next()
            if trial is None:
                self._is_closed = True
                return
            self._begin(trial)

    def _next(self) -> Trial | None:
        """The trial to start now; None once there are no more."""
        if self._upcoming is not None:
            return self._upcoming.popleft() if self._upcoming else None
        number, planned = len(self.trials), self.num_planned
        is_over = planned is not None and number >= planned
        point = None if is_over else self.context.sampler.ask(number, self.ledger.is_new)
        return None if point is None else Trial(number, trial_name(number), params_of(point))

    def _num_active(self) -> int:
        return sum(not trial.state.is_final and trial.name not in self._held for trial in self.trials)

    def _begin(self, trial: Trial) -> None:
        """Hands a trial to the engine, unless it cannot be trained or an earlier sweep has trained it."""
        configurations = self.context.configurations
        try:
            job = configurations.job(trial.name, trial.params)
            trial.total_steps = configurations.num_steps(job)
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
        except StorageError:
            raise
        except WeftError as error:
            self.ledger.end(trial, TrialState.FAILED, configuration_error(error, trial.params))

    def _hear(self, event: Event) -> None:
        """Takes note of what the engine did, and does what follows from it."""
        self.trial_time.catch_up(self.ledger.by_name)
        self.context.trackers.hear(event)
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
            self._check_budget()
        elif isinstance(event, EvalDone):
            looked = MeanScores(event.eval_loss, event.eval_mean_token_accuracy)
            if event.is_best:
                self._best_look[trial.name] = looked
            self._see(trial, looked)
            self._after(trial)
        elif isinstance(event, JobPaused) and not event.is_asked_for:
            self._obstacle = f"{trial.name}: {event.reason}"

    def _hear_warning(self, event: JobWarning) -> None:
        """Tells a warning, with its trial where it concerns one alone."""
        trial = self.ledger.by_name.get(event.jobs[0]) if len(event.jobs) == 1 else None
        self.ledger.tell_news("warning", trial, event.message)

    def _hear_start(self, trial: Trial, event: JobStarted) -> None:
        # What was seen after the checkpoint that it goes on from will be seen again.
        trial.state, trial.steps, trial.total_steps = TrialState.TRAINING, event.step, event.num_steps
        trial.points = [point for point in trial.points if point.step <= event.step]
        trial.losses = [pair for pair in trial.losses if pair[0] <= event.step]
        trial.tokens = self.context.engine.jobs[trial.name].num_tokens
        if trial.started_s is None:
            trial.started_s = self.ledger.seconds
        self.ledger.tell_news("started", trial, "")
        self._after(trial)

    def _hear_end(self, trial: Trial, event: JobEnded) -> None:
        job = self.context.engine.jobs[trial.name]
        if trial.state.is_final:
            pass
        elif isinstance(event, JobFailed):
            self.ledger.end(trial, TrialState.FAILED, event.reason.text)
        elif isinstance(event, JobSucceeded):
            if job.progress.has_best or not trial.points:
                # Its weights are not those that were last seen: patience ran out, or nothing was there to evaluate.
                self._see(trial, self._best_look.get(trial.name))
            if not trial.state.is_final:
                self.ledger.end(trial, TrialState.DONE, "")
                self.ledger.keep_best()
        self.context.engine.forget(trial.name)
        self._after(trial)

    def _see(self, trial: Trial, looked: MeanScores | None) -> None:
        """Looks at the objective of a trial; one that has no value fails. Without an evaluation, it is made."""
        context = self.context
        job = context.engine.jobs[trial.name]
        judged = context.directory.job_dir(trial.name) / "judged"
        try:
            value = context.objective.value(context.engine, job, looked, judged)
            reason = f"its {context.objective.metric} at step {job.step} is {value}"
        except StorageError:
            raise
        except ReplicaMemoryError:
            value, reason = math.nan, "the GPU ran out of memory while it was judged; lower capacity or max_jobs."
        except WeftError as error:
            value, reason = math.nan, str(error)
        if math.isfinite(value):
            self.ledger.see(trial, job.step, job.num_tokens, value)
            return
        self.ledger.end(trial, TrialState.FAILED, reason)
        if not job.state.is_final:
            context.engine.cancel(trial.name)

    def _after(self, trial: Trial) -> None:
        """Early stopping, new trials and fresh files, now that something is known."""
        engine, planned = self.context.engine, self.num_planned
        to_come = 0 if self._is_closed or planned is None else planned - len(self.trials)
        verdict = self._rules.judge(self.trials, self._held, to_come)
        for loser, reason in verdict.stop:
            self.ledger.end(loser, TrialState.STOPPED, reason)
            self._held.discard(loser.name)
            engine.cancel(loser.name)
        for other in verdict.hold:
            self._held.add(other.name)
            engine.pause(other.name)
            self.ledger.tell_news("held", other, "")
        for other in verdict.release:
            self._held.discard(other.name)
            engine.resume(other.name)
        self._check_budget()
        self._refill()
        self.ledger.write(at_once=trial.state.is_final)

    def _check_budget(self) -> None:
        """Stops everything once tokens or time are used up."""
        spec, spent = self.context.spec, ""
        if spec.max_tokens is not None and self.ledger.tokens >= spec.max_tokens:
            spent = f"the budget of {spec.max_tokens:,} tokens was used up"
        elif spec.max_seconds is not None and self.ledger.seconds >= spec.max_seconds:
            spent = f"the budget of {spec.max_seconds:g} s was used up"
        if not spent:
            return
        self._is_closed = True
        for trial in self.trials:
            if not trial.state.is_final:
                self._cut_short(trial, spent)
        self.ledger.keep_best()

    def _cut_short(self, trial: Trial, spent: str) -> None:
        """Stops a trial that others did not beat: it may be the best, so it is looked at and its adapter is kept."""
        engine = self.context.engine
        if trial.name in engine.jobs:
            # Its last step may be done and not yet told; what is judged and kept has it.
            job = engine.jobs[trial.name]
            trial.steps, trial.tokens = job.step, job.num_tokens
        if trial.steps:
            if not trial.points or trial.points[-1].step < trial.steps:
                self._see(trial, None)
            engine.export_adapter(trial.name, self.context.directory.adapter_dir(trial.name))
        if not trial.state.is_final:
            self.ledger.end(trial, TrialState.STOPPED, f"at step {trial.steps} {spent}")
            engine.cancel(trial.name)
