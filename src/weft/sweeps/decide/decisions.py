"""What a sweep decides, tick by tick: who stops, who waits, what the budget still pays for, what is tried next.

`ticks.py` says when. Everything decided is on record before it is done, and deciding a tick once more does what is left
to do of it: a sweep that was killed between two of its decisions makes the others when it goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from weft.objectives.metrics import MeanScores
from weft.spec.space import params_of
from weft.sweeps.context import SweepContext
from weft.sweeps.decide.planned_packs import PlannedPacks
from weft.sweeps.decide.start_order import longest_first
from weft.sweeps.decide.ticks import TrialSteps, as_of, has_come, has_ended, next_tick, step_at
from weft.sweeps.decide.token_budget import TokenBudget
from weft.sweeps.ledger import Ledger
from weft.sweeps.record.trials_file import Trial, TrialState, trial_name
from weft.sweeps.search.early_stop import EarlyStop
from weft.sweeps.search.samplers import BLIND, num_at_a_time, num_planned

Begin = Callable[[Trial], None]
See = Callable[[Trial, MeanScores | None], None]


class Decisions:
    """The decisions of one sweep."""

    def __init__(self, context: SweepContext, ledger: Ledger, begin: Begin, see: See) -> None:
        """`begin` hands a trial to the engine; `see` looks at the objective of one that is cut short."""
        spec = context.spec
        self._context, self._ledger, self._begin, self._see = context, ledger, begin, see
        self._rules = EarlyStop(spec.early_stop, context.objective.metric, context.objective.is_max)
        self._steps = TrialSteps(context.configurations, self._rules)
        self._budget = None if spec.max_tokens is None else TokenBudget(spec.max_tokens, self._steps)
        self._planned = num_planned(spec, context.space)
        self._is_free = context.sampler_name in BLIND and not self._rules.is_active and self._budget is None
        """No decision depends on what trials show, so none has to wait for others."""
        self._frees_slots = spec.early_stop.rule == "halving"
        """Trials that wait do so without a slot."""
        self._is_closed = False
        """No more trials are asked for."""
        self._upcoming: deque[Trial] | None = None
        """The trials to come, if they are known."""
        self._packs: PlannedPacks | None = None
        """The same where a plan over several replicas decides how many train at a time."""
        self._without_room: set[str] = set()
        """Trials that have been begun and found no memory; nobody waits for them."""
        self.num_decided = 0
        """Ticks that have been decided in this session."""
        self._due: int | None = None
        """The tick that is decided next."""

    def start(self) -> None:
        """Takes up the sweep where its record ends; in an empty one, the first trials begin."""
        self._upcoming = longest_first(self._context, self._ledger)
        is_planned = self._is_free and self._context.spec.max_jobs is None and self._context.engine.num_replicas > 1
        if self._upcoming and is_planned:
            self._packs = PlannedPacks(self._context, self._upcoming)
        for trial in self._under_way():
            if self._is_parked(trial):
                self._context.engine.pause(trial.name)
            elif not self._is_free and trial.name in self._context.engine.jobs:
                self._context.engine.hold(trial.name, step_at(trial, self._ledger.tick))
        if self._budget is not None:
            self._budget.end = self._ledger.paid_until
            self._is_closed = self._ledger.spent_budget == self._context.spec.max_tokens
        self._due = self._ledger.tick
        self.catch_up()

    def catch_up(self) -> None:
        """Decides all that can be decided by now."""
        while self._due is not None and all(self._has_come(trial) for trial in self._under_way()):
            self._ledger.tick = self._due
            self.num_decided += 1
            self._decide()
            self._due = self._next_due()

    def end_tick(self, trial: Trial, step: int) -> int:
        """When a trial that comes to its own end after a step does so."""
        return self._ledger.tick if self._is_free else trial.start_tick + step

    def note_end(self, trial: Trial) -> None:
        """A trial has come to its own end, perhaps before the next tick that was known."""
        if self._packs is not None:
            self._packs.note_end(trial)
        found = self._next_due()
        self._due = found if self._due is None or found is None else min(self._due, found)

    def note_room(self, trial: Trial, step: int, *, has_room: bool) -> None:
        """A trial was told to wait for memory, or has found some and goes on from a step."""
        if not has_room:
            self._without_room.add(trial.name)
        elif trial.name in self._without_room:
            self._without_room.discard(trial.name)
            self._ledger.go_on(trial, step)
            self._hold()
        if self._due is None:
            self._due = self._next_due()

    def cut_all(self, spent: str) -> None:
        """Ends the sweep where everybody stands."""
        self._is_closed = True
        self._cut([trial for trial in self._ledger.trials if not trial.state.is_final], spent)

    def _next_due(self) -> int | None:
        tick = self._ledger.tick
        if self._is_free:
            return tick if not self._is_closed and self._is_there_a_slot() else None
        under_way = self._under_way()
        found = [next_tick(under_way, tick, self._steps)]
        if self._budget is not None and (under_way or not self._is_closed):
            found.append(self._budget.end)
        return min((later for later in found if later is not None and later > tick), default=None)

    def _has_come(self, trial: Trial) -> bool:
        if self._is_free or self._is_parked(trial) or trial.end_tick is not None:
            return True
        assert self._due is not None
        return has_come(trial, self._context.engine.jobs[trial.name], self._due)

    def _under_way(self) -> list[Trial]:
        """The trials that have not come to their end and have found room."""
        tick = self._ledger.tick
        return [t for t in self._ledger.trials if not has_ended(t, tick) and t.name not in self._without_room]

    def _decide(self) -> None:
        self._ledger.tell_ends()
        num_ended = sum(trial.state.is_final for trial in self._ledger.trials)
        if self._frees_slots:
            # Those that come to a rung together come in the order of their numbers: all but the last wait for others.
            as_seen = [self._as_of(trial) for trial in self._ledger.trials]
            for seen in self._rules.judge(as_seen, self._held(), num_to_come=1).hold[:-1]:
                if self._may_wait(seen):
                    self._park(seen)
        while self._rules.is_active and self._judge():
            # Who waited for one that was stopped is judged now.
            pass
        if self._budget is None:
            self._refill()
        elif self._ledger.tick >= self._budget.end:
            self._refill()
            most = self._context.spec.max_tokens
            unpaid = self._budget.pay(self._ledger.trials, self._under_way(), self._ledger.tick)
            if unpaid and self._ledger.spent_budget != most:
                # On record before anyone is cut short: a slot that becomes free is not to be filled again.
                self._is_closed, self._ledger.spent_budget = True, most
                self._ledger.note_paid(self._ledger.tick)
            self._cut(unpaid, f"the budget of {most:,} tokens was used up")
            self._ledger.note_paid(self._budget.end)
        self._hold()
        self._ledger.write(at_once=num_ended < sum(trial.state.is_final for trial in self._ledger.trials))

    def _judge(self) -> bool:
        """Does what early stopping wants; returns whether that was anything."""
        has_changed = False
        ledger, engine = self._ledger, self._context.engine
        to_come = 0 if self._is_closed or self._planned is None else self._planned - len(ledger.trials)
        verdict = self._rules.judge([self._as_of(trial) for trial in ledger.trials], self._held(), to_come)
        for seen, reason in verdict.stop:
            trial = ledger.by_name[seen.name]
            if trial.state.is_final:
                continue
            trial.steps, trial.tokens, trial.held_step = seen.steps, seen.tokens, None
            has_changed = True
            ledger.end(trial, TrialState.STOPPED, reason)
            engine.cancel(trial.name)
        ledger.tell_ends()
        waiting = [seen for seen in verdict.hold if self._may_wait(seen)]
        for seen in waiting:
            self._park(seen)
        for seen in verdict.release:
            if not self._frees_slots or self._is_there_a_slot():
                has_changed = True
                ledger.go_on(ledger.by_name[seen.name], seen.steps)
                if self._frees_slots:
                    engine.resume(seen.name)
        return has_changed or bool(waiting)

    def _held(self) -> list[str]:
        return [trial.name for trial in self._ledger.trials if trial.held_step is not None]

    def _may_wait(self, seen: Trial) -> bool:
        """Whether a trial can still be told to wait: one whose end is on record went on before the sweep was killed."""
        return self._ledger.by_name[seen.name].end_tick is None

    def _park(self, seen: Trial) -> None:
        """Lets a trial wait where it was seen."""
        self._ledger.hold(self._ledger.by_name[seen.name], seen.steps)
        if self._frees_slots:
            self._context.engine.pause(seen.name)

    def _as_of(self, trial: Trial) -> Trial:
        if trial.name in self._without_room:
            return replace(trial, state=TrialState.WAITING)
        return as_of(trial, self._ledger.tick, self._steps)

    def _is_there_a_slot(self) -> bool:
        slots = num_at_a_time(self._context.spec, self._context.sampler_name)
        if self._packs is not None:
            slots = max(slots, self._packs.widest)
        if self._is_free:
            # Otherwise what is decided would depend on how many replicas there are.
            slots *= self._context.engine.num_replicas
        tick = self._ledger.tick
        taken = [t for t in self._ledger.trials if not has_ended(t, tick) and not self._is_parked(t)]
        return len(taken) < slots

    def _is_parked(self, trial: Trial) -> bool:
        """Whether a trial waits without a slot."""
        return self._frees_slots and trial.held_step is not None

    def _refill(self) -> None:
        """Starts new trials while there are slots and points for them."""
        while not self._is_closed and self._is_there_a_slot():
            ledger, under_way = self._ledger, self._under_way()
            if self._budget is not None and not self._budget.has_room(ledger.trials, under_way, ledger.tick):
                self._is_closed = not under_way
                return
            trial = self._next()
            if trial is None:
                self._is_closed = True
                return
            self._begin(trial)
            ledger.tell_ends()

    def _next(self) -> Trial | None:
        """The trial to start now; None once there are no more."""
        if self._packs is not None:
            return self._packs.next()
        if self._upcoming is not None:
            return self._upcoming.popleft() if self._upcoming else None
        number = len(self._ledger.trials)
        is_over = self._planned is not None and number >= self._planned
        point = None if is_over else self._context.sampler.ask(number, self._ledger.is_new)
        return None if point is None else Trial(number, trial_name(number), params_of(point))

    def _hold(self) -> None:
        """Lets every trial train up to where something may next be decided about it."""
        tick, engine = self._ledger.tick, self._context.engine
        for trial in [] if self._is_free else self._under_way():
            if trial.name not in engine.jobs or trial.state.is_final:
                continue
            step = step_at(trial, tick)
            until = step if trial.held_step is not None else self._steps.next_comparison(trial, step)
            engine.hold(trial.name, until if self._budget is None else min(until, self._budget.end - trial.start_tick))

    def _cut(self, trials: list[Trial], spent: str) -> None:
        """Stops trials that others did not beat: each may be the best, so it is looked at and its adapter is kept."""
        engine = self._context.engine
        for trial in trials:
            engine.hold_steps(trial.name)
            job = engine.jobs[trial.name]
            if job.step:
                # Its last step may be done and not yet told; what is judged and kept has it.
                trial.steps, trial.tokens = job.step, job.num_tokens
                if all(point.step != job.step for point in trial.points):
                    self._see(trial, None)
                engine.export_adapter(trial.name, self._context.directory.adapter_dir(trial.name))
            if not trial.state.is_final:
                self._ledger.end(trial, TrialState.STOPPED, f"at step {trial.steps} {spent}")
                engine.cancel(trial.name)
        if trials:
            self._ledger.tell_ends()
            self._ledger.keep_best()
