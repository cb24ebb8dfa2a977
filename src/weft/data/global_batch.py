"""The samples between two optimizer steps of a job, looked up by step."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from weft.data.dataset import Dataset
from weft.data.order import BatchSchedule
from weft.data.sample import Sample

MAX_HELD = 16
"""Global batches at hand: what runs, and what a planner sees ahead of it."""


@dataclass(frozen=True)
class GlobalBatch:
    """The samples between two optimizer steps."""

    samples: tuple[Sample, ...]
    divisor: float
    """What its loss is divided by."""
    num_tokens: int


class GlobalBatches:
    """All global batches of one job: a function of its samples and its order, with the last ones kept at hand."""

    def __init__(self, data: Dataset, order: BatchSchedule) -> None:
        self.order = order
        self._data = data
        self._held: OrderedDict[int, GlobalBatch] = OrderedDict()

    def __getitem__(self, step: int) -> GlobalBatch:
        held = self._held.get(step)
        if held is None:
            samples = tuple(self._data.samples[i] for i in self.order.batch(step))
            divisor = self._data.objective.divisor([sample.total_weight for sample in samples])
            held = GlobalBatch(samples, divisor, sum(sample.length for sample in samples))
            self._held[step] = held
            if len(self._held) > MAX_HELD:
                self._held.popitem(last=False)
        return held

    def lengths(self, step: int) -> list[int]:
        """The tokens of each sample of a step, in order."""
        return [self._data.samples[i].length for i in self.order.batch(step)]
