"""The decisions of a sweep: which trials start, stop or wait, and which steps the budget pays for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from weft.objectives.objective import MeanScores
from weft.spec.space import params_of
from weft.sweeps.early_stop import EarlyStop, TrialSteps, as_of, has_ended, next_tick, step_at
from weft.sweeps.ledger import Ledger, SweepContext, longest_first
from weft.sweeps.planned_packs import PlannedPacks
from weft.sweeps.samplers import BLIND, num_at_a_time, num_planned
from weft.sweeps.trials_file import Trial, TrialState, trial_name

Begin = Callable[[Trial], None]
See = Callable[[Trial, MeanScores | None], None]


class Decisions:
    def __init__(self, context: SweepContext, ledger: Ledger, begin: Begin, see: See) -> None:
        """`begin` hands a trial to the engine; `see` evaluates the objective of one that is cut short."""
        spec = context.spec
        self._context, self._ledger, self._begin, self._see = context, ledger, begin, see
        self._rules = EarlyStop(spec.early_stop, context.objective.metric, context.objective.is_max)
        self._steps = TrialSteps(context.configurations, self._rules)
        self._budget = None if spec.max_tokens is None else TokenBudget(spec.max_tokens, self._steps)
        self._planned = num_planned(spec, context.space)
        self._is_free = context.sampler_name in BLIND and not self._rules.is_active and self._budget is None
        """True if no decision depends on results, so that no trial waits for others."""
        self._frees_slots = spec.early_stop.rule == "halving"
        self._is_closed = False
        self._upcoming: deque[Trial] | None = None
        """The remaining trials, if they are known in advance."""
        self.packs: PlannedPacks | None = None
        """The remaining trials in packs, if they are known in advance and `max_jobs` does not decide."""
        self._without_room: set[str] = set()
        """Started trials that found no memory; no decision waits for them."""
        self.num_decided = 0
        self._due: int | None = None

    def start(self) -> None:
        """Continues the recorded sweep; in an empty one, the first trials begin."""
        self._upcoming = longest_first(self._context, self._ledger)
        if self._upcoming and self._context.spec.max_jobs is None:
            self.packs = PlannedPacks(self._context, self._upcoming, self._ledger.trials, is_free=self._is_free)
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
        while self._due is not None and all(self._has_come(trial) for trial in self._under_way()):
            self._ledger.tick = self._due
            self.num_decided += 1
            self._decide()
            self._due = self._next_due()

    def end_tick(self, trial: Trial, step: int) -> int:
        """The tick of a trial that ends by itself after a step."""
        return self._ledger.tick if self._is_free else trial.start_tick + step

    def note_end(self, trial: Trial) -> None:
        """Records that a trial ended by itself, perhaps before the next known tick."""
        if self.packs is not None:
            self.packs.note_end(trial)
        found = self._next_due()
        self._due = found if self._due is None or found is None else min(self._due, found)

    def note_room(self, trial: Trial, step: int, *, has_room: bool) -> None:
        """Records that a trial waits for memory, or has found some and goes on from a step."""
        if not has_room:
            self._without_room.add(trial.name)
        elif trial.name in self._without_room:
            self._without_room.discard(trial.name)
            self._ledger.go_on(trial, step)
            self._hold()
        if self._due is None:
            self._due = self._next_due()

    def cut_all(self, spent: str) -> None:
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
        step = step_at(trial, self._due)
        # At this very step, work that is left may end the trial.
        return trial.steps > step or (trial.steps == step and not self._context.engine.jobs[trial.name].may_end)

    def _under_way(self) -> list[Trial]:
        tick = self._ledger.tick
        return [t for t in self._ledger.trials if not has_ended(t, tick) and t.name not in self._without_room]

    def _decide(self) -> None:
        self._ledger.report_ends()
        num_ended = sum(trial.state.is_final for trial in self._ledger.trials)
        if self._frees_slots:
            # Trials that reach a rung together do so by number: all but the last wait for others.
            as_seen = [self._as_of(trial) for trial in self._ledger.trials]
            for seen in self._rules.decide(as_seen, self._held(), num_to_come=1).hold[:-1]:
                if self._may_wait(seen):
                    self._park(seen)
        while self._rules.is_active and self._stop_early():
            # Trials that waited for a stopped one are compared now.
            pass
        if self._budget is None:
            self._refill()
        elif self._ledger.tick >= self._budget.end:
            self._refill()
            most = self._context.spec.max_tokens
            unpaid = self._budget.pay(self._ledger.trials, self._under_way(), self._ledger.tick)
            if unpaid and self._ledger.spent_budget != most:
                # Recorded before any trial is cut short: a slot that becomes free is not filled again.
                self._is_closed, self._ledger.spent_budget = True, most
                self._ledger.note_paid(self._ledger.tick)
            self._cut(unpaid, f"the budget of {most:,} tokens was used up")
            self._ledger.note_paid(self._budget.end)
        self._hold()
        self._ledger.write(at_once=num_ended < sum(trial.state.is_final for trial in self._ledger.trials))

    def _stop_early(self) -> bool:
        """Applies early stopping; returns whether anything changed."""
        has_changed = False
        ledger, engine = self._ledger, self._context.engine
        to_come = 0 if self._is_closed or self._planned is None else self._planned - len(ledger.trials)
        decision = self._rules.decide([self._as_of(trial) for trial in ledger.trials], self._held(), to_come)
        for seen, reason in decision.stop:
            trial = ledger.by_name[seen.name]
            if trial.state.is_final:
                continue
            trial.steps, trial.tokens, trial.held_step = seen.steps, seen.tokens, None
            has_changed = True
            ledger.end(trial, TrialState.STOPPED, reason)
            engine.cancel(trial.name)
        ledger.report_ends()
        waiting = [seen for seen in decision.hold if self._may_wait(seen)]
        for seen in waiting:
            self._park(seen)
        for seen in decision.release:
            if not self._frees_slots or self._is_there_a_slot():
                has_changed = True
                ledger.go_on(ledger.by_name[seen.name], seen.steps)
                if self._frees_slots:
                    engine.resume(seen.name)
        return has_changed or bool(waiting)

    def _held(self) -> list[str]:
        return [trial.name for trial in self._ledger.trials if trial.held_step is not None]

    def _may_wait(self, seen: Trial) -> bool:
        """True if a trial can still wait: one with a recorded end went on before the sweep was killed."""
        return self._ledger.by_name[seen.name].end_tick is None

    def _park(self, seen: Trial) -> None:
        self._ledger.hold(self._ledger.by_name[seen.name], seen.steps)
        if self._frees_slots:
            self._context.engine.pause(seen.name)

    def _as_of(self, trial: Trial) -> Trial:
        if trial.name in self._without_room:
            return replace(trial, state=TrialState.WAITING)
        return as_of(trial, self._ledger.tick, self._steps)

    def _is_there_a_slot(self) -> bool:
        slots = num_at_a_time(self._context.spec, self._context.sampler_name)
        if self._is_free:
            slots = max(slots, 0 if self.packs is None else self.packs.widest)
            # Otherwise decisions would depend on the number of replicas.
            slots *= self._context.engine.num_replicas
        tick = self._ledger.tick
        taken = [t for t in self._ledger.trials if not has_ended(t, tick) and not self._is_parked(t)]
        return len(taken) < slots

    def _is_parked(self, trial: Trial) -> bool:
        return self._frees_slots and trial.held_step is not None

    def _refill(self) -> None:
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
            ledger.report_ends()

    def _next(self) -> Trial | None:
        if self.packs is not None:
            return self.packs.next()
        if self._upcoming is not None:
            return self._upcoming.popleft() if self._upcoming else None
        number = len(self._ledger.trials)
        is_over = self._planned is not None and number >= self._planned
        point = None if is_over else self._context.sampler.propose(number, self._ledger.is_new)
        return None if point is None else Trial(number, trial_name(number), params_of(point))

    def _hold(self) -> None:
        """Lets every trial train up to its next possible decision."""
        tick, engine = self._ledger.tick, self._context.engine
        for trial in [] if self._is_free else self._under_way():
            if trial.name not in engine.jobs or trial.state.is_final:
                continue
            step = step_at(trial, tick)
            until = step if trial.held_step is not None else self._steps.next_comparison(trial, step)
            engine.hold(trial.name, until if self._budget is None else min(until, self._budget.end - trial.start_tick))

    def _cut(self, trials: list[Trial], spent: str) -> None:
        """Stops trials at the end of a budget: each may be the best, so it is evaluated and its adapter is kept."""
        engine = self._context.engine
        for trial in trials:
            engine.hold_steps(trial.name)
            job = engine.jobs[trial.name]
            if job.step:
                # Its last step may be done and not yet reported; the evaluation and the adapter include it.
                trial.steps, trial.tokens = job.step, job.num_tokens
                if all(point.step != job.step for point in trial.points):
                    self._see(trial, None)
                engine.export_adapter(trial.name, self._context.directory.adapter_dir(trial.name))
            if not trial.state.is_final:
                self._ledger.end(trial, TrialState.STOPPED, f"at step {trial.steps} {spent}")
                engine.cancel(trial.name)
        if trials:
            self._ledger.report_ends()
            self._ledger.keep_best()


WINDOW = 8
"""Ticks of the longest window: as far as a planner looks ahead."""


class TokenBudget:
    """A budget of tokens, paid in windows of ticks."""

    def __init__(self, most: int, steps: TrialSteps) -> None:
        self._most = most
        self._steps = steps
        self.end = -1
        """Tick up to which steps are paid; no trial starts before."""

    def has_room(self, trials: Sequence[Trial], under_way: Sequence[Trial], tick: int) -> bool:
        """True if one more trial could take a step beside the next one of all others, as far as known."""
        due = [self._cost(trial, tick, 1) for trial in under_way]
        return self._spent(trials, tick) + sum(due) + max(due, default=1) <= self._most

    def pay(self, trials: Sequence[Trial], under_way: Sequence[Trial], tick: int) -> list[Trial]:
        """Pays for the next window; returns the running trials whose next step is not paid."""
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
