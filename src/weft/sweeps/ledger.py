"""The state of a sweep's trials, written to its record, sampler, storage and leaderboard.

Everything that must survive is on disk before it takes effect.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import WeftError
from weft.report.trackers import Trackers
from weft.spec.space import Space, params_of, value_key
from weft.spec.sweep import SweepSpec
from weft.store import json_text
from weft.store.run_dir import RunDirectory
from weft.sweeps.configure import Configurations, SweepEngine
from weft.sweeps.early_stop import has_ended
from weft.sweeps.leaderboard import (
    BOARD,
    PreviousSweep,
    Totals,
    best_of,
    board_of,
    read_losses,
    write_best,
    write_board,
)
from weft.sweeps.objective import TrialObjective
from weft.sweeps.samplers import BLIND, Sampler, num_planned
from weft.sweeps.trials_file import Observation, Trial, TrialsFile, TrialState, trial_name

WRITE_EVERY_S = 1.0
"""Most seconds between updates of the leaderboard's files; ends are written at once."""

OnNews = Callable[[str, Trial | None, str], None]
"""Receives events: started, step, point, held, done, stopped, failed or warning; the trial; a sentence."""


class Ledger:
    def __init__(self, context: SweepContext, on_news: OnNews) -> None:
        self._context = context
        self._record = TrialsFile(context.folder)
        self.on_news = on_news
        self.trials: list[Trial] = []
        self.by_name: dict[str, Trial] = {}
        self.one_by_one_seconds: float | None = None
        self.num_packs = 0
        self.predicted_ends: list[tuple[float, float]] = []
        """The sweep's end as predicted at a moment, both in its seconds."""
        self.tick = 0
        self.paid_until = -1
        self.spent_budget: int | None = None
        """Budget of tokens that is used up; no trial starts within it."""
        self._known: set[str] = set()
        self._reported: set[str] = set()
        self._best: str | None = None
        self._written_s = -math.inf
        self._start = time.perf_counter()
        self._before_s = 0.0
        self._end_s: float | None = None

    @property
    def seconds(self) -> float:
        return self._before_s + (time.perf_counter() if self._end_s is None else self._end_s) - self._start

    @property
    def tokens(self) -> int:
        return sum(trial.tokens for trial in self.trials if not trial.origin)

    @property
    def best(self) -> Trial | None:
        return best_of(self.trials, self._context.spec.objective.is_max, self._context.folder)

    def stop_clock(self) -> None:
        self._end_s = time.perf_counter()

    def is_new(self, point: Mapping[str, Any]) -> bool:
        return value_key(params_of(point)) not in self._known

    def restore(self) -> None:
        """Restores the recorded state, and starts the clock; the caller continues trials without an end."""
        self._start = time.perf_counter()
        for trial in self._context.previous.trials if self._context.previous is not None else ():
            point = self._context.space.point_of(trial.params)
            if point is not None:
                self._context.sampler.report(point, trial)
        trials = self._record.read()
        self.tick, self.paid_until = self._record.tick, self._record.paid_until
        self.spent_budget = self._record.spent_budget
        self._retrace(trials)
        for trial in trials:
            if not trial.origin:
                trial.losses = read_losses(self._context.directory, trial.name)
        self._before_s = self._record.seconds
        known = json_text.read_object(self._context.folder / BOARD)
        self.one_by_one_seconds = known.get("one_by_one_seconds")
        self.num_packs, self.predicted_ends[:] = known.get("num_packs") or 0, known.get("predicted_ends") or []
        self.keep_best()

    def add(self, trial: Trial) -> None:
        if trial.name not in self.by_name:
            trial.chosen_tick = trial.start_tick = self.tick
            self._enter(trial)
            self._record.add_trial(trial, self.seconds)

    def take_over(self, trial: Trial, home: Path, earlier: Trial) -> None:
        """Adopts the result of an identical trial of an earlier sweep; its directory stays where it is."""
        trial.origin, trial.points = str(home.resolve()), list(earlier.points)
        trial.steps, trial.tokens, trial.seconds = earlier.steps, earlier.tokens, earlier.seconds
        for point in trial.points:
            self._record.add_point(trial, point)
        self.end(trial, TrialState.DONE, f"taken from {home}")
        self.keep_best()

    def see(self, trial: Trial, step: int, tokens: int, value: float) -> None:
        point = Observation(step, tokens, value, self.seconds)
        trial.see(point)
        self._record.add_point(trial, point)
        self.on_news("point", trial, "")

    def hold(self, trial: Trial, step: int) -> None:
        trial.held_step = step
        self._record.add_hold(trial, self.tick, self.seconds)
        self.on_news("held", trial, "")

    def go_on(self, trial: Trial, step: int) -> None:
        self._record.add_go_on(trial, step, self.tick, self.seconds)
        trial.held_step, trial.start_tick = None, self.tick - step

    def note_paid(self, until: int) -> None:
        self._record.add_paid(self.tick, until, self.spent_budget, self.seconds)

    def end(self, trial: Trial, state: TrialState, reason: str, *, tick: int | None = None) -> None:
        trial.state, trial.reason = state, reason
        trial.end_tick = self.tick if tick is None else tick
        trial.ended_s = None if trial.started_s is None else self.seconds
        self._record.add_end(trial, self.seconds)
        self.on_news(str(state), trial, reason)

    def report_ends(self) -> None:
        ended = [t for t in self.trials if has_ended(t, self.tick) and t.name not in self._reported]
        for trial in sorted(ended, key=_end_order):
            self._report_end(trial)

    def board(self, *, with_curves: bool = True) -> dict[str, Any]:
        time_split = self._context.engine.time_split.to_json()
        totals = Totals(
            self._context.sampler_name,
            self.seconds,
            self.tokens,
            self.one_by_one_seconds,
            time_split,
            self.num_packs,
            tuple(self.predicted_ends),
        )
        return board_of(self._context.spec, list(self.trials), totals, with_curves=with_curves)

    def write(self, *, at_once: bool) -> None:
        """Updates the leaderboard's files, at once or if they are old."""
        if at_once or time.perf_counter() - self._written_s >= WRITE_EVERY_S:
            self._written_s = time.perf_counter()
            write_board(self._context.folder, self.board())

    def keep_best(self) -> None:
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
        """Adds recorded trials; the sampler sees the same requests and reports in the same order as before."""
        last, sampler = self.tick, self._context.sampler
        for trial in trials:
            self.tick = trial.chosen_tick
            self.report_ends()
            point = self._context.space.point_of(trial.params)
            if point is not None:
                sampler.retrace(trial.number, point, self.is_new)
            self._enter(trial)
        self.tick = last
        self.report_ends()

    def _report_end(self, trial: Trial) -> None:
        self._reported.add(trial.name)
        point = self._context.space.point_of(trial.params)
        if point is not None:
            self._context.sampler.report(point, trial)
            self._context.copy_trial(point, trial)


def _end_order(trial: Trial) -> tuple[int, bool, int]:
    """Trials that ended by themselves at a tick come before those stopped there."""
    return trial.end_tick or 0, trial.state is TrialState.STOPPED, trial.number


@dataclass(frozen=True, kw_only=True)
class PreparedSweep:
    spec: SweepSpec
    base_dir: Path
    space: Space
    sampler_name: str
    engine: SweepEngine
    configurations: Configurations
    objective: TrialObjective
    previous: PreviousSweep | None
    notes: tuple[str, ...]
    begun_s: float


@dataclass(frozen=True, kw_only=True)
class SweepContext(PreparedSweep):
    """A sweep in its folder."""

    sampler: Sampler
    folder: Path
    directory: RunDirectory
    trackers: Trackers
    startup_s: float
    copy_trial: Callable[[Mapping[str, Any], Trial], None]


MOST_AHEAD = 1000
"""Trials of a sweep up to which all are known before the first one starts."""


def longest_first(context: SweepContext, ledger: Ledger) -> deque[Trial] | None:
    """All trials, those with the most steps first, so that no long one trains alone at the end. None where they are not
    known in advance: the sampler learns, or a budget of tokens or time may end first."""
    planned = num_planned(context.spec, context.space)
    is_cut = context.spec.max_tokens is not None or context.spec.max_seconds is not None
    if context.sampler_name not in BLIND or planned is None or planned > MOST_AHEAD or is_cut:
        return None
    tried, chosen = {trial.number for trial in ledger.trials}, set[str]()
    upcoming: list[Trial] = []
    for number in range(planned):
        if number in tried:
            continue
        point = context.sampler.propose(
            number, lambda point: ledger.is_new(point) and value_key(params_of(point)) not in chosen
        )
        if point is None:
            break
        params = params_of(point)
        chosen.add(value_key(params))
        upcoming.append(Trial(number, trial_name(number), params))
    return deque(sorted(upcoming, key=lambda trial: (-_num_steps(trial, context.configurations), trial.number)))


def _num_steps(trial: Trial, configurations: Configurations) -> int:
    try:
        return configurations.num_steps(configurations.job(trial.name, trial.params))
    except WeftError:
        # It fails, with the reason, as soon as it is started.
        return 0
