"""Orders found by running the pipeline ahead of time: a stage never idles while anything it may do has arrived.

Problem: choose every stage's order to minimise the makespan, subject to: data flows from stage to stage and back, a
job's next global batch waits for its step on that stage, and what lies between forward and backward fits into memory.
Method: list scheduling over the cost model, O(stages × microbatches × log). A stage that is free takes the first
backward that has arrived (it frees memory and lets a step come), else the next forward of the stream if memory and the
jobs' steps allow. Forwards, and hence backwards, keep the stream's order. No order can deadlock: the last stage's
backward is ready when its forward ends, so some stage always goes on if every microbatch fits alone.
Bound: as some stage always computes or some transfer is under way, the makespan is at most all work and transfers in a
row; on N equal microbatches, each job's batches S or more apart, it is (N + S - 1)(forward + backward), the least.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.cost.types import CostModel
from weft.plan.pipeline.lead import Order, does_not_fit
from weft.plan.pipeline.stream import Stream
from weft.plan.stages import Backward, Forward

NEVER = float("inf")


@dataclass
class _Stage:
    """One stage while the pipeline is run ahead."""

    activation_at: list[float]
    """When each microbatch's input arrives."""
    gradient_at: list[float]
    free_at: float = 0.0
    num_forwards: int = 0
    num_backwards: int = 0
    held: int = 0
    order: Order = field(default_factory=list)


def eager_orders(
    stream: Stream,
    num_stages: int,
    cost: CostModel,
    memory_bytes: Sequence[int] | None,
    flushes: Sequence[int] = (),
    max_lead: Sequence[int] | None = None,
) -> list[Order]:
    """Orders of all stages; `max_lead` caps what a stage has in flight, in microbatches."""
    return _Run(stream, num_stages, cost, memory_bytes, flushes, max_lead).orders()


class _Run:
    def __init__(
        self,
        stream: Stream,
        num_stages: int,
        cost: CostModel,
        memory_bytes: Sequence[int] | None,
        flushes: Sequence[int],
        max_lead: Sequence[int] | None,
    ) -> None:
        size = len(stream.microbatches)
        self.stages = [_Stage([0.0 if s == 0 else NEVER] * size, [NEVER] * size) for s in range(num_stages)]
        self.lengths = [[segment.length for segment in m.segments] for m in stream.microbatches]
        self.completes = {k: len(batches) for k, batches in stream.completes.items()}
        self.waits_for = list(stream.waits_for)
        for start, end in zip((0, *flushes), flushes, strict=False):
            if start:
                self.waits_for[start:end] = [max(start - 1, w) for w in self.waits_for[start:end]]
        self.cost, self.memory_bytes, self.max_lead = cost, memory_bytes, max_lead
        self.wakes = [(0.0, 0)]

    def orders(self) -> list[Order]:
        size = len(self.lengths)
        while self.wakes:
            now, place = heapq.heappop(self.wakes)
            stage = self.stages[place]
            if stage.free_at > now or stage.num_backwards == size:
                continue
            if stage.gradient_at[stage.num_backwards] <= now:
                self._backward(stage, place, now)
            elif self._may_forward(stage, place, now):
                self._forward(stage, place, now)
        return [stage.order for stage in self.stages]

    def _may_forward(self, stage: _Stage, place: int, now: float) -> bool:
        k = stage.num_forwards
        if k == len(self.lengths) or stage.activation_at[k] > now or self.waits_for[k] >= stage.num_backwards:
            return False
        if self.max_lead is not None and k - stage.num_backwards >= self.max_lead[place]:
            return False
        if self.memory_bytes is None:
            return True
        held, limit = self._held(k, place), self.memory_bytes[place]
        if held > limit:
            raise does_not_fit(k, place, held, limit)
        return stage.held + held <= limit

    def _held(self, k: int, place: int) -> int:
        return self.cost.held_bytes(self.lengths[k], place) if self.lengths[k] else 0

    def _forward(self, stage: _Stage, place: int, now: float) -> None:
        k, lengths = stage.num_forwards, self.lengths[stage.num_forwards]
        end = now + (self.cost.forward_s(lengths, place) if lengths else 0.0)
        stage.order.append(Forward(k))
        stage.num_forwards += 1
        stage.held += self._held(k, place)
        if place + 1 < len(self.stages):
            self._arrive(self.stages[place + 1].activation_at, k, place + 1, end)
        else:
            stage.gradient_at[k] = end
        self._busy_until(stage, place, end)

    def _backward(self, stage: _Stage, place: int, now: float) -> None:
        k, lengths = stage.num_backwards, self.lengths[stage.num_backwards]
        end = now + (self.cost.backward_s(lengths, place) if lengths else 0.0)
        stage.order.append(Backward(k))
        stage.num_backwards += 1
        stage.held -= self._held(k, place)
        if place > 0:
            self._arrive(self.stages[place - 1].gradient_at, k, place - 1, end)
        self._busy_until(stage, place, end + self.completes.get(k, 0) * self.cost.step_s(place))

    def _arrive(self, arrivals: list[float], k: int, place: int, sent_at: float) -> None:
        arrivals[k] = sent_at + self.cost.transfer_s(sum(self.lengths[k]))
        heapq.heappush(self.wakes, (arrivals[k], place))

    def _busy_until(self, stage: _Stage, place: int, end: float) -> None:
        stage.free_at = end
        heapq.heappush(self.wakes, (end, place))
