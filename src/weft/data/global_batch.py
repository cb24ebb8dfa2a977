"""The samples between two optimizer steps of a job, looked up by step."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from weft.data.dataset import Dataset, Member
from weft.data.order import BatchSchedule
from weft.data.sample import Sample

MAX_HELD = 16
"""Global batches in memory: what runs, and what a planner reads ahead."""


@dataclass(frozen=True)
class GlobalBatch:
    """The samples between two optimizer steps; they are made when the first microbatch needs one."""

    data: Dataset
    groups: tuple[int, ...]

    @functools.cached_property
    def members(self) -> tuple[Member, ...]:
        """Members group by group."""
        return tuple(member for group in self.groups for member in self.data.members(group))

    @functools.cached_property
    def lengths(self) -> list[int]:
        return [length for group in self.groups for length in self.data.member_lengths(group)]

    @functools.cached_property
    def divisor(self) -> float:
        samples = self.data.samples
        weights = [samples.total_weight(i) for group in self.groups for i in self.data.sample_indices(group)]
        return self.data.objective.divisor(weights)

    @functools.cached_property
    def num_tokens(self) -> int:
        """Tokens of the samples that are trained."""
        return int(self.data.group_tokens[list(self.groups)].sum())


class GlobalBatches:
    """All global batches of one job: a function of its samples and its order, with the last ones in memory."""

    def __init__(self, data: Dataset, order: BatchSchedule) -> None:
        self.order = order
        self.data = data
        self._held: OrderedDict[int, GlobalBatch] = OrderedDict()

    def __getitem__(self, step: int) -> GlobalBatch:
        held = self._held.get(step)
        if held is None:
            held = GlobalBatch(self.data, tuple(self.order.batch(step).tolist()))
            self._held[step] = held
            if len(self._held) > MAX_HELD:
                self._held.popitem(last=False)
        return held

    def lengths(self, step: int) -> list[int]:
        return self[step].lengths

    def samples_from(self, step: int) -> Iterator[Sample]:
        """The samples, without leading rows, of a step and of later steps in its epoch, in order."""
        end = min((step // self.order.steps_per_epoch + 1) * self.order.steps_per_epoch, self.order.num_steps)
        for later in range(step, end):
            for group in self.order.batch(later).tolist():
                yield from (member.own for member in self.data.members(group))

    def groups(self, step: int, first: int = 0) -> tuple[int, ...]:
        """Number of members from `first` on that share a microbatch, group by group; empty where each is by itself."""
        size = self.data.num_members
        return (size,) * ((len(self[step].lengths) - first) // size) if size > 1 else ()
