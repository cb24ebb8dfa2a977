"""The samples between two optimizer steps of a job, looked up by step."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from weft.data.dataset import Dataset, Member
from weft.data.order import BatchSchedule
from weft.objectives.objective import LikelihoodObjective

MAX_HELD = 16
"""Global batches at hand: what runs, and what a planner sees ahead of it."""


@dataclass(frozen=True)
class GlobalBatch:
    """The samples between two optimizer steps."""

    members: tuple[Member, ...]
    """Group by group."""
    divisor: float
    """What its loss is divided by."""
    num_tokens: int
    """Of the samples that are trained."""


class GlobalBatches:
    """All global batches of one job: a function of its samples and its order, with the last ones kept at hand."""

    def __init__(self, data: Dataset, order: BatchSchedule) -> None:
        self.order = order
        self._data = data
        self._held: OrderedDict[int, GlobalBatch] = OrderedDict()

    def __getitem__(self, step: int) -> GlobalBatch:
        held = self._held.get(step)
        if held is None:
            members = tuple(member for i in self.order.batch(step) for member in self._data.members(int(i)))
            samples = [member.sample for member in members if not member.is_bare]
            divisor = self._data.objective.divisor([sample.total_weight for sample in samples])
            held = GlobalBatch(members, divisor, sum(sample.length for sample in samples))
            self._held[step] = held
            if len(self._held) > MAX_HELD:
                self._held.popitem(last=False)
        return held

    def lengths(self, step: int) -> list[int]:
        """The tokens of each member of a step, in order."""
        return [member.sample.length for member in self[step].members]

    @property
    def judge(self) -> LikelihoodObjective | None:
        """The job's objective, if it weighs tokens by their log-probabilities."""
        return self._data.judge

    def groups(self, step: int, first: int = 0) -> tuple[int, ...]:
        """How many members from `first` on share a microbatch, group by group; empty where each is by itself."""
        size = len(self._data.members(0))
        return (size,) * ((len(self[step].members) - first) // size) if size > 1 else ()
