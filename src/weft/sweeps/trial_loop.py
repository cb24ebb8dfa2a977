"""Trains a sweep: one engine, as many trials at a time as there are slots, a new one as soon as one ends.

A point is proposed, its job takes a slot, its values are recorded as it trains, early stopping compares them, it ends,
is stopped or fails, and the sampler receives the result. A killed sweep resumes: ended trials are not trained again,
the others go on from their checkpoints.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from weft.engine.engine import Engine
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
    LayoutDecided,
    StepDone,
)
from weft.engine.execute.protocol import ReplicaFaultError, ReplicaMemoryError, executor_beside
from weft.engine.recorder import check_backbone, check_inputs
from weft.engine.resume import job_settings
from weft.engine.timeline import TimelineRecorder
from weft.errors import CheckpointError, DataError, StorageError, WeftError
from weft.objectives.objective import MeanScores
from weft.plan.simulate.timeline import Span
from weft.spec import JobSpec
from weft.store.checkpoint import newest_content
from weft.store.wall_clock import Activity
from weft.sweeps.configure import SweepEngine, configuration_error
from weft.sweeps.decisions import Decisions
from weft.sweeps.leaderboard import read_losses
from weft.sweeps.ledger import Ledger, OnNews, SweepContext
from weft.sweeps.planned_packs import Makespan
from weft.sweeps.samplers import num_planned
from weft.sweeps.trials_file import Trial, TrialState


class SweepRun:
    def __init__(self, context: SweepContext, on_news: OnNews = lambda kind, trial, text: None) -> None:
        self.context = context
        self.ledger = Ledger(context, on_news)
        self.trial_time = TrialTime(context.engine.timeline)
        self._decisions = Decisions(context, self.ledger, self._begin, self._see)
        self._makespan: Makespan | None = None
        self._best_look: dict[str, MeanScores] = {}
        """Evaluation with the smallest loss of each trial: that of its weights if patience ends it."""
        self._unstarted: set[str] = set()
        self._obstacle: str | None = None

    @property
    def trials(self) -> list[Trial]:
        return self.ledger.trials

    @property
    def num_planned(self) -> int | None:
        return num_planned(self.context.spec, self.context.space)

    @property
    def is_out_of_time(self) -> bool:
        most = self.context.spec.max_seconds
        return most is not None and self.ledger.seconds + self.context.startup_s >= most

    def train(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Trains until the space or a budget is used up, or `should_stop` is true; then every trial is saved."""
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
        if self._decisions.packs is not None:
            self.ledger.num_packs = self.ledger.num_packs or self._decisions.packs.num_packs
            self._makespan = Makespan(self._decisions.packs, self.ledger.predicted_ends)
        is_stopped, num_decided = False, -1
        # Trials that wait for each other go on after the decision they wait for.
        while num_decided < self._decisions.num_decided and not is_stopped:
            num_decided = self._decisions.num_decided
            for event in self.context.engine.events():
                self._handle(event)
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
        if found is not None and self._is_still_same(trial, job, found[0]):
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

    def _is_still_same(self, trial: Trial, job: JobSpec, home: Path) -> bool:
        """False if an earlier sweep's trial with the same settings had another backbone or other data."""
        checkpoint = newest_content(home / "checkpoints")
        if checkpoint is None:
            return True
        state, environment = checkpoint
        try:
            check_backbone(environment, self.context.engine.executor.facts.environment, home.name)
            check_inputs(state, self.context.configurations.inputs(job), home.name)
        except (CheckpointError, DataError) as error:
            self.ledger.on_news("warning", trial, f"is not taken from {home}: {error}")
            return False
        return True

    def _handle(self, event: Event) -> None:
        self.trial_time.catch_up(self.ledger.by_name)
        self.context.trackers.record(event)
        if isinstance(event, JobWarning):
            concerned = self.ledger.by_name.get(event.jobs[0]) if len(event.jobs) == 1 else None
            self.ledger.on_news("warning", concerned, event.message)
            return
        if isinstance(event, LayoutDecided):
            self._handle_layout(event)
            return
        trial = self.ledger.by_name.get(event.job) if isinstance(event, JobEvent) else None
        if trial is None:
            return
        elif isinstance(event, JobEnded):
            self._handle_end(trial, event)
        elif trial.state.is_final:
            # It was stopped a moment ago; the engine will notice.
            return
        elif isinstance(event, JobStarted):
            self._handle_start(trial, event)
        elif isinstance(event, StepDone):
            trial.steps, trial.tokens = event.step, event.num_tokens
            if math.isfinite(event.loss):
                trial.losses.append((event.step, event.loss))
            self.ledger.on_news("step", trial, "")
        elif isinstance(event, EvalDone):
            looked = MeanScores(event.eval_loss, event.eval_mean_token_accuracy)
            if event.is_best:
                self._best_look[trial.name] = looked
            self._see(trial, looked)
        elif isinstance(event, JobWaiting | JobPreempted | JobResumed):
            self._decisions.note_room(trial, event.step, has_room=isinstance(event, JobResumed))
        elif isinstance(event, JobPaused) and not event.is_requested:
            self._obstacle = f"{trial.name}: {event.reason}"
        # Not before resumed trials have started again.
        is_whole = not any(t.name in self._unstarted and t.points and t.held_step is None for t in self.trials)
        if is_whole and self.is_out_of_time:
            self._decisions.cut_all(f"the budget of {self.context.spec.max_seconds:g} s was used up")
        self._decisions.catch_up()
        if self._makespan is not None:
            self._makespan.note(self.trials, self.ledger.seconds, has_step=isinstance(event, StepDone))
        self.ledger.write(at_once=False)

    def _handle_layout(self, event: LayoutDecided) -> None:
        directory = self.context.directory
        if event.has_moved:
            # A full disk is reported where a trial's files cannot be written.
            with suppress(StorageError):
                directory.write_run(directory.read_run().in_layout(event.layout))
        self.ledger.on_news("layout", None, event.text)

    def _handle_start(self, trial: Trial, event: JobStarted) -> None:
        trial.state, trial.steps, trial.total_steps = TrialState.TRAINING, event.step, event.num_steps
        known = {step: loss for step, loss in trial.losses if step <= event.step}
        if event.step > max(known, default=0):
            # Steps of a replica that ended before it could report them.
            written = read_losses(self.context.directory, trial.name)
            known |= {step: loss for step, loss in written if step <= event.step}
        trial.losses = sorted(known.items())
        trial.tokens = self.context.engine.jobs[trial.name].num_tokens
        if trial.started_s is None:
            trial.started_s = self.ledger.seconds
        self._unstarted.discard(trial.name)
        self._decisions.note_room(trial, event.step, has_room=True)
        self.ledger.on_news("started", trial, "")

    def _handle_end(self, trial: Trial, event: JobEnded) -> None:
        job = self.context.engine.jobs[trial.name]
        if trial.state.is_final:
            pass
        elif isinstance(event, JobFailed):
            self.ledger.end(
                trial, TrialState.FAILED, event.reason.text, tick=self._decisions.end_tick(trial, trial.steps)
            )
        elif isinstance(event, JobSucceeded):
            if job.has_best or not trial.points:
                # Its weights are not those last evaluated: patience ran out, or nothing was evaluated.
                self._see(trial, self._best_look.get(trial.name))
            if not trial.state.is_final:
                self.ledger.end(trial, TrialState.DONE, "", tick=self._decisions.end_tick(trial, trial.steps))
                self.ledger.keep_best()
        self.context.engine.forget(trial.name)
        self._unstarted.discard(trial.name)
        self._decisions.note_end(trial)

    def _see(self, trial: Trial, looked: MeanScores | None) -> None:
        context = self.context
        job = context.engine.jobs[trial.name]
        folder = context.directory.job_dir(trial.name) / "judged"
        try:
            with context.engine.timeline.wall.spending(Activity.EVALUATING):
                value = context.objective.value(context.engine, job, looked, folder)
            reason = f"its {context.objective.metric} at step {job.step} is {value}"
        except (StorageError, ReplicaFaultError):
            raise
        except ReplicaMemoryError:
            value, reason = math.nan, "the GPU ran out of memory in its evaluation; lower capacity or max_jobs."
        except WeftError as error:
            value, reason = math.nan, str(error)
        if math.isfinite(value):
            self.ledger.see(trial, job.step, job.num_tokens, value)
            return
        self.ledger.end(trial, TrialState.FAILED, reason, tick=self._decisions.end_tick(trial, job.step))
        self._decisions.note_end(trial)
        if not job.state.is_final:
            context.engine.cancel(trial.name)


_SHARED = ("forward_backward", "step", "eval", "checkpoint")


class TrialTime:
    """Attributes the time in an engine's growing timeline to trials."""

    def __init__(self, timeline: TimelineRecorder) -> None:
        self._timeline = timeline
        self._last: Span | None = None
        self.training_s = 0.0
        self.training_tokens = 0

    def catch_up(self, trials: Mapping[str, Trial]) -> None:
        """Adds new spans to the trials' seconds: by tokens if there are any, else in equal parts."""
        fresh = list(itertools.takewhile(lambda span: span is not self._last, reversed(self._timeline.spans)))
        self._last = fresh[0] if fresh else self._last
        for span in (span for span in fresh if span.name in _SHARED):
            jobs: dict[str, int] = span.args["jobs"]
            self.training_s += span.duration_s if span.name in ("forward_backward", "step") else 0.0
            total = sum(jobs.values())
            self.training_tokens += total if span.name == "forward_backward" else 0
            for name, tokens in jobs.items():
                if name in trials:
                    trials[name].seconds += span.duration_s * (tokens / total if total else 1 / len(jobs))


NUM_MEASURED = 4
"""Trials that are measured alone, spread from the fewest tokens per step to the most."""
WARM_STEPS, SOLO_STEPS = 2, 6
MOST_OF_THE_TIME, LEAST_S = 0.05, 2.0
"""Measuring stops after this share of the sweep's time, or these seconds if that is more."""


def can_be_alone(engine: SweepEngine) -> bool:
    """True if a trial can be measured beside the sweep: on a whole backbone in this process."""
    return isinstance(engine, Engine) and not engine.executor.facts.takes_programs


def one_by_one_seconds(run: SweepRun) -> float | None:
    """Estimated seconds of the sweep with one trial at a time; None if nothing was trained here."""
    trained = [trial for trial in run.trials if trial.steps and trial.tokens and not trial.origin]
    spent = run.trial_time
    if not trained or not spent.training_tokens:
        return None
    until = time.perf_counter() + max(LEAST_S, MOST_OF_THE_TIME * run.ledger.seconds)
    measured: list[tuple[float, float]] = []
    for trial in _spread(trained):
        seconds = _seconds_per_step(run, trial)
        if seconds is not None:
            measured.append((trial.tokens / trial.steps, seconds))
        if time.perf_counter() > until:
            break
    if not measured:
        return None
    sizes, costs = zip(*sorted(measured), strict=True)
    alone = sum(t.steps * float(np.interp(t.tokens / t.steps, sizes, costs)) for t in trained)
    # A resumed sweep knows only this session's speed, which is assumed for earlier ones.
    together = run.ledger.tokens * spent.training_s / spent.training_tokens
    return max(run.ledger.seconds - together, 0.0) + alone


def _spread(trials: Sequence[Trial]) -> list[Trial]:
    ordered = sorted(trials, key=lambda trial: (trial.tokens / trial.steps, trial.number))
    indices = np.linspace(0, len(ordered) - 1, min(NUM_MEASURED, len(ordered)))
    return [ordered[round(index)] for index in indices]


def _seconds_per_step(run: SweepRun, trial: Trial) -> float | None:
    context = run.context
    job = context.configurations.job(trial.name, trial.params)
    # Evaluations would count as training.
    job = replace(job, eval_data=None, early_stopping_patience=None)
    assert isinstance(context.engine, Engine), "measured on the replica of this process"
    engine = Engine(executor_beside(context.engine.executor), capacity=context.spec.capacity)
    try:
        data = replace(context.configurations.data(context.configurations.job(trial.name, trial.params)), eval=None)
        engine.submit(job, data, base_dir=context.base_dir)
    except WeftError:
        return None
    times = [time.perf_counter()]
    for event in engine.events():
        if isinstance(event, StepDone):
            times.append(time.perf_counter())
            if event.step >= WARM_STEPS + SOLO_STEPS:
                engine.cancel(trial.name)
    warm = min(WARM_STEPS, len(times) - 2)
    return (times[-1] - times[warm]) / (len(times) - 1 - warm) if warm >= 0 else None
