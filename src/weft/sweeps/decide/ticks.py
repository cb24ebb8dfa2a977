"""In which order a sweep decides: by ticks, of which every trial under way takes one step each.

A trial stands at tick `start_tick + step`, however fast it really trains. What is decided at a tick (who stops, who
waits, which point is tried next, whose step still fits the budget) is decided once every trial under way has come
there, from what it had shown by then, and no trial trains beyond the tick at which something may be decided about it.
So a sweep's decisions follow from its values alone: not from how long steps take, nor from where a killed sweep found
its checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from weft.data.global_batch import GlobalBatches
from weft.data.order import BatchSchedule
from weft.spec import JobSpec
from weft.sweeps.configure import Configurations
from weft.sweeps.record.trials_file import Observation, Trial, TrialState
from weft.sweeps.search.early_stop import EarlyStop
from weft.sweeps.sweep_engine import SweepJob


class TrialSteps:
    """What is known of the steps of trials before they are taken: tokens, evaluations, and where a rule judges."""

    def __init__(self, configurations: Configurations, rules: EarlyStop) -> None:
        self._configurations = configurations
        self._rules = rules
        self._batches: dict[str, GlobalBatches] = {}
        self._tokens: dict[str, list[int]] = {}
        """Of a trial, by the number of steps."""

    def tokens(self, trial: Trial, step: int) -> int:
        """Trained by a trial in its first steps."""
        known = self._tokens.setdefault(trial.name, [0])
        if len(known) <= step:
            batches = self._batches_of(trial)
            for place in range(len(known) - 1, step):
                known.append(known[-1] + batches[place].num_tokens)
        return known[step]

    def next_comparison(self, trial: Trial, step: int) -> int:
        """The first step after this one at which early stopping judges a trial; its last if there is none."""
        job = self._job(trial)
        data = self._configurations.data(job)
        if data.eval is None or not self._rules.is_active:
            return trial.total_steps
        every = job.eval_steps or BatchSchedule.of(job, *data.train.sizes).steps_per_epoch
        for later in range(step - step % every + every, trial.total_steps, every):
            before = self._seen(trial, later - every) if later > every else None
            if self._rules.is_compared(trial, self._seen(trial, later), before):
                return later
        return trial.total_steps

    def _seen(self, trial: Trial, step: int) -> Observation:
        tokens = self.tokens(trial, step) if self._rules.counts_tokens else 0
        return Observation(step, tokens, 0.0, 0.0)

    def _job(self, trial: Trial) -> JobSpec:
        return self._configurations.job(trial.name, trial.params)

    def _batches_of(self, trial: Trial) -> GlobalBatches:
        if trial.name not in self._batches:
            job = self._job(trial)
            data = self._configurations.data(job).train
            self._batches[trial.name] = GlobalBatches(data, BatchSchedule.of(job, *data.sizes))
        return self._batches[trial.name]


def step_at(trial: Trial, tick: int) -> int:
    """Where a trial stands at a tick."""
    if has_ended(trial, tick):
        return trial.steps
    return tick - trial.start_tick if trial.held_step is None else trial.held_step


def has_ended(trial: Trial, tick: int) -> bool:
    """Whether a trial had come to its end by a tick."""
    return trial.end_tick is not None and trial.end_tick <= tick


def next_tick(trials: Iterable[Trial], tick: int, steps: TrialSteps) -> int | None:
    """The first tick after this one at which something may be decided; None if nobody trains."""
    found = []
    for trial in trials:
        if trial.end_tick is not None:
            found.append(trial.end_tick)
        elif trial.held_step is None:
            found.append(trial.start_tick + steps.next_comparison(trial, tick - trial.start_tick))
    return min((later for later in found if later > tick), default=None)


def has_come(trial: Trial, job: SweepJob, tick: int) -> bool:
    """Whether all is known of a trial up to a tick."""
    if trial.end_tick is not None:
        return True
    step = step_at(trial, tick)
    if trial.steps != step:
        return trial.steps > step
    # What this very step leaves to do may end the trial.
    return not job.may_end


def as_of(trial: Trial, tick: int, steps: TrialSteps) -> Trial:
    """A trial as it stood at a tick."""
    if has_ended(trial, tick):
        return trial
    step = step_at(trial, tick)
    points = [point for point in trial.points if point.step <= step]
    return replace(trial, state=TrialState.TRAINING, points=points, steps=step, tokens=steps.tokens(trial, step))
