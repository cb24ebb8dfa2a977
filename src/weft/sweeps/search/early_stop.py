"""When a trial stops because others do better; pure decisions, told in one sentence each.

A place is how far a trial is: the part of its own steps that is done, its steps, or its tokens. Rungs are at grace,
grace·factor, grace·factor², …; a trial is at a rung with its first value at or past it, and is judged there by the best
value it has had until then: values go up and down while rates are high, and one bad moment says little.

asha      Whoever is not among the best 1/factor at a rung, nor among the best `min_trials`, stops. Trials that train
          side by side come to a rung in any order within a moment, and the first of them would be judged by who happens
          to be early; so a trial waits at a rung while any of those that are at least half-way to it is still to come.
          Once it has gone on, only its next rung counts.
halving   The same, but a trial waits at a rung until all that could still come have come, without a slot.
median    A trial stops where its value is worse than the median of the others' values at the same place, if at least
          `min_trials` have come that far.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from weft.spec.sweep import EarlyStopSpec
from weft.sweeps.record.trials_file import Observation, Trial, TrialState

NEAR = 0.5
"""How much of the way to a rung makes a trial one that is waited for."""


@dataclass(frozen=True)
class Verdict:
    """What early stopping wants done with trials that train."""

    stop: tuple[tuple[Trial, str], ...] = ()
    """With the reason."""
    hold: tuple[Trial, ...] = ()
    """To wait where they are; under halving without a slot."""
    release: tuple[Trial, ...] = ()
    """To go on after waiting."""


class EarlyStop:
    """Judges the trials of one sweep."""

    def __init__(self, spec: EarlyStopSpec, metric: str, is_max: bool) -> None:
        self._spec = spec
        self._metric = metric
        self._sign = -1.0 if is_max else 1.0

    def judge(self, trials: Sequence[Trial], held: Iterable[str] = (), num_to_come: int = 0) -> Verdict:
        """What to do now, given all trials, the names of those that wait, and how many have not started yet."""
        if self._spec.rule == "none":
            return Verdict()
        if self._spec.rule == "halving":
            return self._halving(trials, set(held), num_to_come)
        training = [t for t in trials if t.state is TrialState.TRAINING and t.steps < t.total_steps]
        here = [trial for trial in training if trial.points and trial.points[-1].step == trial.steps]
        if self._spec.rule == "asha":
            return self._asha(here, trials, set(held))
        return Verdict(tuple(found for trial in here for found in self._median(trial, trials)))

    @property
    def is_active(self) -> bool:
        """Whether trials are judged at all."""
        return self._spec.rule != "none"

    @property
    def counts_tokens(self) -> bool:
        """Whether places are numbers of tokens."""
        return self._spec.unit == "tokens"

    def is_compared(self, trial: Trial, point: Observation, before: Observation | None) -> bool:
        """Whether a trial is judged where it is seen, given where it was seen before."""
        if self._spec.rule == "median":
            return self.place(trial, point) >= self._spec.first_rung * (1 - 1e-9)
        rung = self._rung_of(trial, point)
        return rung is not None and (before is None or rung != self._rung_of(trial, before))

    def place(self, trial: Trial, point: Observation | None = None) -> float:
        """How far a trial is, or was at a point."""
        steps, tokens = (trial.steps, trial.tokens) if point is None else (point.step, point.tokens)
        if self._spec.unit == "tokens":
            return float(tokens)
        return steps / max(trial.total_steps, 1) if self._spec.unit == "progress" else float(steps)

    def _asha(self, here: Sequence[Trial], trials: Sequence[Trial], held: set[str]) -> Verdict:
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
        return Verdict(tuple(stop), tuple(hold), tuple(release))

    def _is_awaited(self, rung: int, trials: Sequence[Trial]) -> bool:
        """Whether anyone who is at least half-way to a rung is still to come."""
        return any(
            other.state is TrialState.TRAINING
            and self._at_rung(other, rung) is None
            and self.place(other) >= NEAR * self._rung_at(rung)
            for other in trials
        )

    def _halving(self, trials: Sequence[Trial], held: set[str], num_to_come: int) -> Verdict:
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
        return Verdict(tuple(stop), tuple(hold), tuple(release))

    def _losers(self, judged: Sequence[Trial], trials: Sequence[Trial], rung: int) -> Iterable[tuple[Trial, str]]:
        """Those of the judged who are not among the best at a rung."""
        seen = {t.name: self._best_until(t, p) for t in trials if (p := self._at_rung(t, rung)) is not None}
        values = sorted(seen.values())
        share = math.ceil(len(values) / self._spec.factor)
        kept = max(share, self._spec.num_kept)
        if len(values) <= kept:
            return
        cutoff = values[kept - 1]
        best = f"1/{self._spec.factor:g}" if kept == share else f"{kept}"
        bound = f"{'≥' if self._sign < 0 else '≤'} {_number(self._sign * cutoff)}"
        for trial in judged:
            point = self._at_rung(trial, rung)
            if point is not None and seen[trial.name] > cutoff:
                yield (
                    trial,
                    f"by step {point.step} its best {self._metric} {_number(self._sign * seen[trial.name])} was not "
                    f"among the best {best} of {len(values)} trials ({bound})",
                )

    def _median(self, trial: Trial, trials: Sequence[Trial]) -> Iterable[tuple[Trial, str]]:
        if not trial.points or self.place(trial, trial.points[-1]) < self._spec.first_rung * (1 - 1e-9):
            return
        point = trial.points[-1]
        place = self.place(trial, point)
        others = [value for other in trials if other is not trial for value in self._value_at(other, place)]
        if len(others) + 1 < self._spec.num_kept:
            return
        median = statistics.median(others)
        if self._sign * point.value > median:
            yield (
                trial,
                f"at step {point.step} its {self._metric} {_number(point.value)} was worse than "
                f"{_number(self._sign * median)}, the median of {len(others)} other trials there",
            )

    def _value_at(self, trial: Trial, place: float) -> list[float]:
        """The last value of a trial up to a place, if it has come that far."""
        if not trial.points or self.place(trial, trial.points[-1]) < place * (1 - 1e-9):
            return []
        seen = [p for p in trial.points if self.place(trial, p) <= place * (1 + 1e-9)]
        return [self._sign * seen[-1].value] if seen else []

    def _highest_rung(self, trial: Trial) -> int | None:
        """The number of the last rung a trial has a value at."""
        return self._rung_of(trial, trial.points[-1]) if trial.points else None

    def _rung_of(self, trial: Trial, point: Observation) -> int | None:
        """The number of the last rung at or before a point."""
        reached = self.place(trial, point) / self._spec.first_rung
        if reached < 1 - 1e-9:
            return None
        rung = math.floor(math.log(reached, self._spec.factor) + 1e-9)
        # At the end of its steps a trial is done, whatever it has reached.
        return rung if self._spec.unit != "progress" or self._rung_at(rung) < 1 - 1e-9 else rung - 1

    def _rung_at(self, rung: int) -> float:
        return self._spec.first_rung * self._spec.factor**rung

    def _at_rung(self, trial: Trial, rung: int) -> Observation | None:
        """The first value of a trial at or past a rung."""
        place = self._rung_at(rung) * (1 - 1e-9)
        return next((point for point in trial.points if self.place(trial, point) >= place), None)

    def _best_until(self, trial: Trial, point: Observation) -> float:
        """The best value of a trial up to a point; the smaller the better, whatever the metric."""
        return min(self._sign * p.value for p in trial.points if p.step <= point.step)


def _number(value: float) -> str:
    return f"{value:.4g}"
