"""Early stopping: when a trial stops because others do better; pure decisions with a reason in one sentence.

A trial's position is the fraction of its own steps, its steps, or its tokens. Rungs are at grace, grace·factor,
grace·factor², …; a trial is at a rung with its first value at or past it, and is compared there by its best value so
far: values fluctuate while learning rates are high, and a single bad value means little.

asha      A trial that is neither among the best 1/factor at a rung nor among the best `min_trials` stops. Trials that
          train side by side reach a rung at about the same time, and the first of them would be compared by chance; so
          a trial waits at a rung while any trial at least half-way to it has not arrived. After that, only its next
          rung counts.
halving   The same, but a trial waits at a rung, without a slot, until all trials that can reach it have.
median    A trial stops where its value is worse than the median of the others' values at the same position, if at least
          `min_trials` have come that far.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from weft.data.dataset import GlobalBatches
from weft.data.order import BatchSchedule
from weft.spec import JobSpec
from weft.spec.sweep import EarlyStopSpec
from weft.sweeps.configure import Configurations
from weft.sweeps.trials_file import Observation, Trial, TrialState

NEAR = 0.5
"""Fraction of the way to a rung from which a trial is waited for."""


@dataclass(frozen=True)
class StopDecision:
    stop: tuple[tuple[Trial, str], ...] = ()
    hold: tuple[Trial, ...] = ()
    """Trials that wait at their position; under halving without a slot."""
    release: tuple[Trial, ...] = ()


class EarlyStop:
    def __init__(self, spec: EarlyStopSpec, metric: str, is_max: bool) -> None:
        self._spec = spec
        self._metric = metric
        self._sign = -1.0 if is_max else 1.0

    def decide(self, trials: Sequence[Trial], held: Iterable[str] = (), num_to_come: int = 0) -> StopDecision:
        """Decides for all trials; `held`: names of those that wait; `num_to_come`: trials that have not started."""
        if self._spec.rule == "none":
            return StopDecision()
        if self._spec.rule == "halving":
            return self._halving(trials, set(held), num_to_come)
        training = [t for t in trials if t.state is TrialState.TRAINING and t.steps < t.total_steps]
        here = [trial for trial in training if trial.points and trial.points[-1].step == trial.steps]
        if self._spec.rule == "asha":
            return self._asha(here, trials, set(held))
        return StopDecision(tuple(found for trial in here for found in self._median(trial, trials)))

    @property
    def is_active(self) -> bool:
        return self._spec.rule != "none"

    @property
    def counts_tokens(self) -> bool:
        return self._spec.unit == "tokens"

    def is_compared(self, trial: Trial, point: Observation, before: Observation | None) -> bool:
        """True if a trial is compared at `point`, given where it was seen before."""
        if self._spec.rule == "median":
            return self.position(trial, point) >= self._spec.first_rung * (1 - 1e-9)
        rung = self._rung_of(trial, point)
        return rung is not None and (before is None or rung != self._rung_of(trial, before))

    def position(self, trial: Trial, point: Observation | None = None) -> float:
        steps, tokens = (trial.steps, trial.tokens) if point is None else (point.step, point.tokens)
        if self._spec.unit == "tokens":
            return float(tokens)
        return steps / max(trial.total_steps, 1) if self._spec.unit == "progress" else float(steps)

    def _asha(self, here: Sequence[Trial], trials: Sequence[Trial], held: set[str]) -> StopDecision:
        stop: list[tuple[Trial, str]] = []
        hold: list[Trial] = []
        release: list[Trial] = []
        for trial in here:
            rung = self._highest_rung(trial)
            if rung is None or self._at_rung(trial, rung) is not trial.points[-1]:
                continue
            if self._is_awaited(rung, trials):
                hold += [trial] if trial.name not in held else []
                continue
            losers = list(self._losers([trial], trials, rung))
            stop += losers
            release += [trial] if trial.name in held and not losers else []
        return StopDecision(tuple(stop), tuple(hold), tuple(release))

    def _is_awaited(self, rung: int, trials: Sequence[Trial]) -> bool:
        """True if a trial at least half-way to a rung has not arrived."""
        return any(
            other.state is TrialState.TRAINING
            and self._at_rung(other, rung) is None
            and self.position(other) >= NEAR * self._rung_at(rung)
            for other in trials
        )

    def _halving(self, trials: Sequence[Trial], held: set[str], num_to_come: int) -> StopDecision:
        training = [trial for trial in trials if trial.state is TrialState.TRAINING]
        is_open = num_to_come > 0 or any(trial.state is TrialState.WAITING for trial in trials)
        stop: list[tuple[Trial, str]] = []
        hold: list[Trial] = []
        release: list[Trial] = []
        on_the_way = [trial for trial in training if trial.steps < trial.total_steps]
        for rung in sorted({r for t in on_the_way if (r := self._highest_rung(t)) is not None}):
            here = [trial for trial in on_the_way if self._highest_rung(trial) == rung]
            if is_open or any(self._at_rung(trial, rung) is None for trial in training):
                hold += [t for t in here if t.name not in held and self._at_rung(t, rung) is t.points[-1]]
                continue
            losers = list(self._losers(here, trials, rung))
            stop += losers
            release += [t for t in here if t.name in held and t not in [loser for loser, _ in losers]]
        return StopDecision(tuple(stop), tuple(hold), tuple(release))

    def _losers(self, compared: Sequence[Trial], trials: Sequence[Trial], rung: int) -> Iterable[tuple[Trial, str]]:
        seen = {t.name: self._best_until(t, p) for t in trials if (p := self._at_rung(t, rung)) is not None}
        values = sorted(seen.values())
        share = math.ceil(len(values) / self._spec.factor)
        kept = max(share, self._spec.num_kept)
        if len(values) <= kept:
            return
        cutoff = values[kept - 1]
        best = f"1/{self._spec.factor:g}" if kept == share else f"{kept}"
        bound = f"{'≥' if self._sign < 0 else '≤'} {_number(self._sign * cutoff)}"
        for trial in compared:
            point = self._at_rung(trial, rung)
            if point is not None and seen[trial.name] > cutoff:
                yield (
                    trial,
                    f"by step {point.step} its best {self._metric} {_number(self._sign * seen[trial.name])} was not "
                    f"among the best {best} of {len(values)} trials ({bound})",
                )

    def _median(self, trial: Trial, trials: Sequence[Trial]) -> Iterable[tuple[Trial, str]]:
        if not trial.points or self.position(trial, trial.points[-1]) < self._spec.first_rung * (1 - 1e-9):
            return
        point = trial.points[-1]
        at = self.position(trial, point)
        others = [value for other in trials if other is not trial for value in self._value_at(other, at)]
        if len(others) + 1 < self._spec.num_kept:
            return
        median = statistics.median(others)
        if self._sign * point.value > median:
            yield (
                trial,
                f"at step {point.step} its {self._metric} {_number(point.value)} was worse than "
                f"{_number(self._sign * median)}, the median of {len(others)} other trials there",
            )

    def _value_at(self, trial: Trial, position: float) -> list[float]:
        if not trial.points or self.position(trial, trial.points[-1]) < position * (1 - 1e-9):
            return []
        seen = [p for p in trial.points if self.position(trial, p) <= position * (1 + 1e-9)]
        return [self._sign * seen[-1].value] if seen else []

    def _highest_rung(self, trial: Trial) -> int | None:
        return self._rung_of(trial, trial.points[-1]) if trial.points else None

    def _rung_of(self, trial: Trial, point: Observation) -> int | None:
        reached = self.position(trial, point) / self._spec.first_rung
        if reached < 1 - 1e-9:
            return None
        rung = math.floor(math.log(reached, self._spec.factor) + 1e-9)
        # At the end of its steps a trial is done and no longer compared.
        return rung if self._spec.unit != "progress" or self._rung_at(rung) < 1 - 1e-9 else rung - 1

    def _rung_at(self, rung: int) -> float:
        return self._spec.first_rung * self._spec.factor**rung

    def _at_rung(self, trial: Trial, rung: int) -> Observation | None:
        least = self._rung_at(rung) * (1 - 1e-9)
        return next((point for point in trial.points if self.position(trial, point) >= least), None)

    def _best_until(self, trial: Trial, point: Observation) -> float:
        """The best value of a trial up to a point, as a minimum."""
        return min(self._sign * p.value for p in trial.points if p.step <= point.step)


def _number(value: float) -> str:
    return f"{value:.4g}"


class TrialSteps:
    def __init__(self, configurations: Configurations, rules: EarlyStop) -> None:
        self._configurations = configurations
        self._rules = rules
        self._batches: dict[str, GlobalBatches] = {}
        self._tokens: dict[str, list[int]] = {}

    def tokens(self, trial: Trial, step: int) -> int:
        known = self._tokens.setdefault(trial.name, [0])
        if len(known) <= step:
            batches = self._batches_of(trial)
            for index in range(len(known) - 1, step):
                known.append(known[-1] + batches[index].num_tokens)
        return known[step]

    def next_comparison(self, trial: Trial, step: int) -> int:
        """The next step at which early stopping compares a trial; its last step if there is none."""
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
    if has_ended(trial, tick):
        return trial.steps
    return tick - trial.start_tick if trial.held_step is None else trial.held_step


def has_ended(trial: Trial, tick: int) -> bool:
    return trial.end_tick is not None and trial.end_tick <= tick


def next_tick(trials: Iterable[Trial], tick: int, steps: TrialSteps) -> int | None:
    """The next tick at which something may be decided; None if no trial trains."""
    found = []
    for trial in trials:
        if trial.end_tick is not None:
            found.append(trial.end_tick)
        elif trial.held_step is None:
            found.append(trial.start_tick + steps.next_comparison(trial, tick - trial.start_tick))
    return min((later for later in found if later > tick), default=None)


def as_of(trial: Trial, tick: int, steps: TrialSteps) -> Trial:
    if has_ended(trial, tick):
        return trial
    step = step_at(trial, tick)
    points = [point for point in trial.points if point.step <= step]
    return replace(trial, state=TrialState.TRAINING, points=points, steps=step, tokens=steps.tokens(trial, step))
