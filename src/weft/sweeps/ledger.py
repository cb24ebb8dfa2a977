"""Everything a sweep knows of its trials, and everyone who must hear of it: record, sampler, storage, leaderboard.

What must not be forgotten is on disk before anyone acts on it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from weft.spec.space import params_of, value_key
from weft.sweeps.context import SweepContext
from weft.sweeps.decide.ticks import has_ended
from weft.sweeps.record.leaderboard import Totals, best_of, board_of, read_board, read_losses, write_best, write_board
from weft.sweeps.record.trials_file import Observation, Trial, TrialsFile, TrialState

WRITE_EVERY_S = 1.0
"""The leaderboard's files are at most this old while trials go on; ends are written at once."""

OnNews = Callable[[str, Trial | None, str], None]
"""Hears what happens: started, step, point, held, done, stopped, failed or warning; the trial; a sentence."""


class Ledger:
    """The trials of a sweep."""

    def __init__(self, context: SweepContext, on_news: OnNews) -> None:
        self._context = context
        self._record = TrialsFile(context.folder)
        self.tell_news = on_news
        self.trials: list[Trial] = []
        """In the order they were tried."""
        self.by_name: dict[str, Trial] = {}
        self.one_by_one_seconds: float | None = None
        """What the sweep would have taken one trial after another, once that is measured."""
        self.tick = 0
        """Of the last decision; see `ticks.py`."""
        self.paid_until = -1
        """The tick up to which a budget of tokens has paid for steps."""
        self.spent_budget: int | None = None
        """The budget of tokens that can no longer pay for all; nothing new starts within it."""
        self._known: set[str] = set()
        """What has been tried."""
        self._told: set[str] = set()
        """Trials whose end the sampler knows."""
        self._best: str | None = None
        """The trial that `best/` holds."""
        self._written_s = -math.inf
        self._start = time.perf_counter()
        self._before_s = 0.0
        self._end_s: float | None = None

    @property
    def seconds(self) -> float:
        """What the sweep has taken, earlier sessions included."""
        return self._before_s + (time.perf_counter() if self._end_s is None else self._end_s) - self._start

    @property
    def tokens(self) -> int:
        """Tokens trained here, over all trials."""
        return sum(trial.tokens for trial in self.trials if not trial.origin)

    @property
    def best(self) -> Trial | None:
        """The best trial that has ended and left an adapter."""
        return best_of(self.trials, self._context.spec.objective.is_max, self._context.folder)

    def stop_clock(self) -> None:
        """What comes now is no longer part of the sweep."""
        self._end_s = time.perf_counter()

    def is_new(self, point: Mapping[str, Any]) -> bool:
        """Whether no trial has this point."""
        return value_key(params_of(point)) not in self._known

    def restore(self) -> None:
        """Takes up what is on disk, and starts the clock; trials without an end are the caller's to go on with."""
        self._start = time.perf_counter()
        for trial in self._context.previous.trials if self._context.previous is not None else ():
            point = self._context.space.point_of(trial.params)
            if point is not None:
                self._context.sampler.tell(point, trial)
        trials = self._record.read()
        self.tick, self.paid_until = self._record.tick, self._record.paid_until
        self.spent_budget = self._record.spent_budget
        self._retrace(trials)
        for trial in trials:
            if not trial.origin:
                trial.losses = read_losses(self._context.directory, trial.name)
        self._before_s = self._record.seconds
        self.one_by_one_seconds = read_board(self._context.folder).get("one_by_one_seconds")
        self.keep_best()

    def add(self, trial: Trial) -> None:
        """A configuration has been chosen, or is taken up again."""
        if trial.name not in self.by_name:
            trial.chosen_tick = trial.start_tick = self.tick
            self._enter(trial)
            self._record.add_trial(trial, self.seconds)

    def take_over(self, trial: Trial, home: Path, twin: Trial) -> None:
        """An earlier sweep has trained the very same: its result counts, and its directory stays where it is."""
        trial.origin, trial.points = str(home.resolve()), list(twin.points)
        trial.steps, trial.tokens, trial.seconds = twin.steps, twin.tokens, twin.seconds
        for point in trial.points:
            self._record.add_point(trial, point)
        self.end(trial, TrialState.DONE, f"taken from {home}")
        self.keep_best()

    def see(self, trial: Trial, step: int, tokens: int, value: float) -> None:
        """The objective of a trial was seen."""
        point = Observation(step, tokens, value, self.seconds)
        trial.see(point)
        self._record.add_point(trial, point)
        self.tell_news("point", trial, "")

    def hold(self, trial: Trial, step: int) -> None:
        """A trial waits at a step for others."""
        trial.held_step = step
        self._record.add_hold(trial, self.tick, self.seconds)
        self.tell_news("held", trial, "")

    def go_on(self, trial: Trial, step: int) -> None:
        """A trial that stood still at a step goes on."""
        self._record.add_go_on(trial, step, self.tick, self.seconds)
        trial.held_step, trial.start_tick = None, self.tick - step

    def note_paid(self, until: int) -> None:
        """Steps up to a tick are paid."""
        self._record.add_paid(self.tick, until, self.spent_budget, self.seconds)

    def end(self, trial: Trial, state: TrialState, reason: str, *, tick: int | None = None) -> None:
        """A trial has come to its end, now or at a tick that others have not come to yet."""
        trial.state, trial.reason = state, reason
        trial.end_tick = self.tick if tick is None else tick
        trial.ended_s = None if trial.started_s is None else self.seconds
        self._record.add_end(trial, self.seconds)
        self.tell_news(str(state), trial, reason)

    def tell_ends(self) -> None:
        """Tells the sampler how trials have ended, in their order."""
        ended = [t for t in self.trials if has_ended(t, self.tick) and t.name not in self._told]
        for trial in sorted(ended, key=_end_order):
            self._tell_end(trial)

    def board(self, *, with_curves: bool = True) -> dict[str, Any]:
        """The leaderboard as plain data, with or without all that was seen on the way."""
        time_split = self._context.engine.time_split.to_json()
        totals = Totals(self._context.sampler_name, self.seconds, self.tokens, self.one_by_one_seconds, time_split)
        return board_of(self._context.spec, list(self.trials), totals, with_curves=with_curves)

    def write(self, *, at_once: bool) -> None:
        """Brings the leaderboard's files up to date, at once or if they are old."""
        if at_once or time.perf_counter() - self._written_s >= WRITE_EVERY_S:
            self._written_s = time.perf_counter()
            write_board(self._context.folder, self.board())

    def keep_best(self) -> None:
        """Makes `best/` the adapter of the best trial."""
        best = self.best
        if best is not None and best.name != self._best:
            job = self._context.configurations.job(best.name, best.params)
            write_best(self._context.folder, best, job, self._context.spec, self._context.base_dir)
            self._best = best.name

    def _enter(self, trial: Trial) -> None:
        self.trials.append(trial)
        self.by_name[trial.name] = trial
        self._known.add(value_key(trial.params))

    def _retrace(self, trials: list[Trial]) -> None:
        """Enters trials that are on record; the sampler is asked and told what it was, in the same order."""
        last, sampler = self.tick, self._context.sampler
        for trial in trials:
            self.tick = trial.chosen_tick
            self.tell_ends()
            point = self._context.space.point_of(trial.params)
            if point is not None:
                sampler.retrace(trial.number, point, self.is_new)
            self._enter(trial)
        self.tick = last
        self.tell_ends()

    def _tell_end(self, trial: Trial) -> None:
        self._told.add(trial.name)
        point = self._context.space.point_of(trial.params)
        if point is not None:
            self._context.sampler.tell(point, trial)
            self._context.copy_trial(point, trial)


def _end_order(trial: Trial) -> tuple[int, bool, int]:
    """Those that came to their own end at a tick are known before any is stopped there."""
    return trial.end_tick or 0, trial.state is TrialState.STOPPED, trial.number
