"""Which steps a sweep's budget of tokens still pays for, known before they are taken.

Steps are paid for a window of ticks at a time: all that trials under way may take in it. The fewer tokens are left, the
shorter the window. Where not even the next step of everyone can be paid, trials take it in the order of their numbers
as long as it fits, and whoever's does not is cut short. So no token is trained beyond the budget, and what is cut where
follows from the trials alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.sweeps.decide.ticks import TrialSteps, step_at
from weft.sweeps.record.trials_file import Trial

WINDOW = 8
"""Ticks of the longest window: as far as a planner sees ahead."""


class TokenBudget:
    """What is left of a number of tokens."""

    def __init__(self, most: int, steps: TrialSteps) -> None:
        self._most = most
        self._steps = steps
        self.end = -1
        """The tick up to which steps are paid; nothing new starts before."""

    def has_room(self, trials: Sequence[Trial], under_way: Sequence[Trial], tick: int) -> bool:
        """Whether one more trial could take a step beside the next one of everyone, as far as steps are known."""
        due = [self._cost(trial, tick, 1) for trial in under_way]
        return self._spent(trials, tick) + sum(due) + max(due, default=1) <= self._most

    def pay(self, trials: Sequence[Trial], under_way: Sequence[Trial], tick: int) -> list[Trial]:
        """Pays for the next window; returns the trials under way whose next step cannot be paid."""
        left = self._most - self._spent(trials, tick)
        num_ticks = WINDOW
        while num_ticks > 1 and sum(self._cost(trial, tick, num_ticks) for trial in under_way) > left:
            num_ticks //= 2
        self.end = tick + num_ticks
        cut = []
        for trial in sorted(under_way, key=lambda trial: trial.number):
            cost = self._cost(trial, tick, num_ticks)
            if cost > left:
                cut.append(trial)
            else:
                left -= cost
        return cut

    def _spent(self, trials: Sequence[Trial], tick: int) -> int:
        return sum(self._steps.tokens(trial, step_at(trial, tick)) for trial in trials if not trial.origin)

    def _cost(self, trial: Trial, tick: int, num_ticks: int) -> int:
        step = step_at(trial, tick)
        last = min(step + num_ticks, trial.total_steps)
        return self._steps.tokens(trial, last) - self._steps.tokens(trial, step)
