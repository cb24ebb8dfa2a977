"""Trials to come in the packs of the packing planner's plan over all replicas.

The plan decides who begins together and how many train at a time. It is no timetable: whoever ends leaves its place to
the next at once, and placement, which sees how fast replicas really are, decides where. A trial that ends before its
last step was planned for, such as by its patience, has the rest planned anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from weft.errors import WeftError
from weft.plan.cost.shape import ModelShape
from weft.plan.sweep import Configuration, SweepPlan, plan_sweep
from weft.sweeps.context import SweepContext
from weft.sweeps.cost_preview import configuration_of
from weft.sweeps.record.trials_file import Trial


class PlannedPacks:
    """The trials that have not begun, in the order of their packs."""

    def __init__(self, context: SweepContext, trials: Iterable[Trial]) -> None:
        """`trials` stay in their order where nothing can be planned, such as for a device that is not known."""
        self._context = context
        self._upcoming = deque(trials)
        self._configurations = self._known_of(self._upcoming)
        self.widest = 0
        """Trials of the widest pack so far: so many have room on a replica, and fill its microbatches."""
        self._plan()

    def next(self) -> Trial | None:
        """The trial to begin now; None once there are no more."""
        return self._upcoming.popleft() if self._upcoming else None

    def note_end(self, trial: Trial) -> None:
        """Plans anew for the trials that are left if one has ended sooner than it was planned to."""
        if self._upcoming and trial.steps < trial.total_steps:
            self._plan()

    def _plan(self) -> None:
        plan = self._found()
        if plan is None:
            return
        self.widest = max(self.widest, *(len(pack.configurations) for pack in plan.packs))
        places = {name: place for place, pack in enumerate(plan.packs) for name in pack.configurations}
        # Those that cannot be planned cannot be trained either, and say why when their turn comes.
        self._upcoming = deque(sorted(self._upcoming, key=lambda trial: places.get(trial.name, len(plan.packs))))

    def _found(self) -> SweepPlan | None:
        spec, engine = self._context.spec, self._context.engine
        chosen = [self._configurations[t.name] for t in self._upcoming if t.name in self._configurations]
        facts = engine.executor.facts
        device = "cpu" if facts.device_kind == "cpu" else str(facts.environment["device"])
        assert isinstance(spec.capacity, int), "it is a number once replicas are there"
        if not chosen:
            return None
        try:
            return plan_sweep(
                chosen,
                ModelShape.from_config(facts.config, spec.base_model),
                device,
                engine.num_replicas,
                quantize=spec.quantize,
                recompute=spec.recompute,
                capacity=spec.capacity,
                max_degree=1,
            )
        except WeftError:
            return None

    def _known_of(self, trials: Iterable[Trial]) -> dict[str, Configuration]:
        found = {}
        for trial in trials:
            try:
                found[trial.name] = configuration_of(self._context.configurations, trial.name, trial.params)
            except WeftError:
                continue
        return found
