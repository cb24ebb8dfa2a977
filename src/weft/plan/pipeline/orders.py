"""Orders of passes on the stages of a pipeline: from their lead, or by playing the pipeline ahead.

A stage's lead is the number of microbatches that it may have between forward and backward.

Forwards and backwards both keep the stream's order, so a stage's order is fixed by one number per backward k: how many
forwards come before it,

    before(s, k) = max m  subject to  m ≤ k + lead(s),  m ≤ the next flush after k,
                                      forward j < m waits for no backward ≥ k,  bytes of k … m - 1 ≤ memory(s),
                                      m ≤ before(s - 1, k).

GPipe's lead is unbounded, 1F1B's is S - s; without flushes the same rule fills the pipe with the next job's samples.
With the last condition any such orders run to their end: when stage s waits for backward k, every forward that later
stages run before it has been sent. O(stages × microbatches).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from weft.errors import PlanError
from weft.plan.cost.learned import AdapterTimes
from weft.plan.cost.types import CostModel
from weft.plan.pipeline.stream import BatchStream, StreamBatch
from weft.plan.program import Backward, Forward
from weft.plan.types import Microbatch

StageOrder = list[Forward | Backward]


def orders_by_lead(
    stream: BatchStream,
    leads: Sequence[int],
    flushes: Sequence[int],
    held_bytes: Callable[[int, int], int],
    memory_bytes: Sequence[int] | None,
) -> list[StageOrder]:
    """Orders of all stages; `held_bytes(microbatch, stage)` counts only under a memory limit."""
    size = len(stream.microbatches)
    allowed = [_unflushed(stream, flushes)]
    for stage, lead in enumerate(leads):
        before = [min(k + lead, allowed[-1][k]) for k in range(size)]
        if memory_bytes is not None:
            before = _within(before, [held_bytes(k, stage) for k in range(size)], memory_bytes[stage], stage)
        allowed.append(before)
    return [_order(before) for before in allowed[1:]]


def _unflushed(stream: BatchStream, flushes: Sequence[int]) -> list[int]:
    """Maximum number of forwards before each backward, by flushes and the jobs' own steps."""
    size = len(stream.microbatches)
    limits = [size] * size
    for start, end in zip((0, *flushes), flushes, strict=False):
        limits[start:end] = [end] * (end - start)
    # Forward j is after backward waits_for[j], so at most j forwards are before that one and all earlier ones.
    for j, wait in enumerate(stream.waits_for):
        if wait >= 0:
            limits[wait] = min(limits[wait], j)
    for k in range(size - 2, -1, -1):
        limits[k] = min(limits[k], limits[k + 1])
    return limits


def _within(before: list[int], held: list[int], limit: int, stage: int) -> list[int]:
    """The counts reduced to what fits into a stage's memory."""
    end, total, result = 0, 0, []
    for k, most in enumerate(before):
        while end < most and total + held[end] <= limit:
            total += held[end]
            end += 1
        if end <= k:
            raise does_not_fit(k, stage, held[k], limit)
        result.append(end)
        total -= held[k]
    return result


def does_not_fit(microbatch: int, stage: int, held: int, limit: int) -> PlanError:
    """The error of a microbatch too large for a stage in any order."""
    return PlanError(
        f"stage {stage}: microbatch {microbatch} keeps {held:,} bytes until its backward, and the stage has {limit:,}; "
        "use a smaller microbatch capacity or more stages."
    )


def _order(before: Sequence[int]) -> StageOrder:
    order: StageOrder = []
    done = 0
    for k, count in enumerate(before):
        order.extend(Forward(j) for j in range(done, count))
        order.append(Backward(k))
        done = max(done, count)
    return order


NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Clock:
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    held_bytes: tuple[int, ...]
    transfer_s: float
    step_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Pass:
    clock: int
    is_backward: bool
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Pipe:
    clocks: Sequence[Clock]
    num_stages: int
    waits_for: Sequence[int]
    """The backward that must end on the same stage before each forward; -1 for none."""
    memory_bytes: Sequence[int] | None = None
    max_lead: Sequence[int] | None = None
    shared: Sequence[Collection[StreamBatch]] = ()
    """Global batches of each clock that have samples on other replicas."""
    needs: Sequence[Collection[StreamBatch]] = ()
    """Global batches that must have been backward everywhere before each clock's forward."""
    waits_for_norms: bool = False
    """True if a forward waits for the gradient norms of the steps it needs, which the first stage computes."""


def open_pipe(
    num_stages: int, memory_bytes: Sequence[int] | None = None, max_lead: Sequence[int] | None = None
) -> Pipe:
    """An empty replica; what is in flight is bounded by memory per stage, or by microbatches per stage."""
    return Pipe((), num_stages, (), memory_bytes, max_lead, waits_for_norms=True)


@dataclass
class _Stage:
    activation_at: list[float]
    gradient_at: list[float]
    free_at: float = 0.0
    num_forwards: int = 0
    num_backwards: int = 0
    held: int = 0
    passes: list[Pass] = field(default_factory=list)
    backward_ends: list[float] = field(default_factory=list)


def eager_orders(
    stream: BatchStream,
    num_stages: int,
    cost: CostModel,
    memory_bytes: Sequence[int] | None,
    flushes: Sequence[int] = (),
    max_lead: Sequence[int] | None = None,
    adapters: AdapterTimes | None = None,
) -> list[StageOrder]:
    """Orders of all stages, played ahead. `max_lead`: most microbatches in flight per stage. `adapters`: what a
    microbatch's jobs add to each pass."""
    num_steps = {k: len(batches) for k, batches in stream.completes.items()}
    clocks = [clock_of(m, num_steps.get(k, 0), num_stages, cost, adapters) for k, m in enumerate(stream.microbatches)]
    waits_for = list(stream.waits_for)
    for start, end in zip((0, *flushes), flushes, strict=False):
        if start:
            waits_for[start:end] = [max(start - 1, w) for w in waits_for[start:end]]
    played = play(clocks, num_stages, memory_bytes, waits_for, max_lead)
    return [[Backward(p.clock) if p.is_backward else Forward(p.clock) for p in passes] for passes in played]


def play(
    clocks: Sequence[Clock],
    num_stages: int,
    memory_bytes: Sequence[int] | None,
    waits_for: Sequence[int] | None = None,
    max_lead: Sequence[int] | None = None,
) -> list[list[Pass]]:
    """The passes of every stage; forward k comes after backward `waits_for[k]` on the same stage."""
    for k, clock in enumerate(clocks):
        for stage, limit in enumerate(memory_bytes or ()):
            if clock.held_bytes[stage] > limit:
                raise does_not_fit(k, stage, clock.held_bytes[stage], limit)
    pipe = Pipe(clocks, num_stages, waits_for or [-1] * len(clocks), memory_bytes, max_lead)
    return play_all([pipe])[0]


def play_all(pipes: Sequence[Pipe]) -> list[list[list[Pass]]]:
    left: Counter[StreamBatch] = Counter()
    for pipe in pipes:
        for batches in pipe.shared:
            left.update(batches)
    ends: dict[StreamBatch, float] = {}
    wakes = [(0.0, replica, 0) for replica in range(len(pipes))]
    plays = [Play(replica, pipe, wakes) for replica, pipe in enumerate(pipes)]
    while wakes:
        now, replica, stage = heapq.heappop(wakes)
        for batch in plays[replica].advance(stage, now):
            left[batch] -= 1
            ends[batch] = max(ends.get(batch, 0.0), plays[replica].stages[stage].free_at)
            if not left[batch]:
                for other, play in enumerate(plays):
                    play.whole_at[batch] = ends[batch]
                    heapq.heappush(wakes, (ends[batch], other, 0))
    for play in plays:
        assert all(each.num_backwards == len(play.clocks) for each in play.stages), "a stage waits for ever"
    return [[each.passes for each in play.stages] for play in plays]


def clock_of(
    microbatch: Microbatch, num_steps: int, num_stages: int, cost: CostModel, adapters: AdapterTimes | None = None
) -> Clock:
    """The clock of one microbatch; an empty one takes no time."""
    stages, lengths = range(num_stages), [segment.length for segment in microbatch.segments]
    added_s = adapters.microbatch_s(microbatch.job_tokens) if adapters else 0.0
    return Clock(
        tuple(cost.forward_s(lengths, s) + added_s if lengths else 0.0 for s in stages),
        tuple(cost.backward_s(lengths, s) + added_s if lengths else 0.0 for s in stages),
        tuple(cost.held_bytes(lengths, s) if lengths else 0 for s in stages),
        cost.transfer_s(sum(lengths)),
        tuple(num_steps * cost.step_s(s) for s in stages),
    )


class Play:
    def __init__(self, own: int, pipe: Pipe, wakes: list[tuple[float, int, int]]) -> None:
        self.own, self.wakes = own, wakes
        self.clocks, self.waits_for = list(pipe.clocks), list(pipe.waits_for)
        self.memory_bytes, self.max_lead = pipe.memory_bytes, pipe.max_lead
        self.shared, self.needs, self.waits_for_norms = list(pipe.shared), list(pipe.needs), pipe.waits_for_norms
        size = len(pipe.clocks)
        self.stages = [_Stage([0.0 if s == 0 else NEVER] * size, [NEVER] * size) for s in range(pipe.num_stages)]
        self.whole_at: dict[StreamBatch, float] = {}
        """Times at which the backwards of shared global batches were done everywhere."""

    def extend(
        self,
        clocks: Sequence[Clock],
        waits_for: Sequence[int],
        shared: Sequence[Collection[StreamBatch]],
        needs: Sequence[Collection[StreamBatch]],
    ) -> None:
        self.clocks += clocks
        self.waits_for += waits_for
        self.shared += shared
        self.needs += needs
        for index, stage in enumerate(self.stages):
            stage.activation_at += [0.0 if index == 0 else NEVER] * len(clocks)
            stage.gradient_at += [NEVER] * len(clocks)

    def has_run_out(self, now: float) -> bool:
        """True if the first stage could run a further forward now."""
        first = self.stages[0]
        k = first.num_backwards
        may_go_back = k < len(self.clocks) and first.gradient_at[k] <= now
        return first.num_forwards == len(self.clocks) and first.free_at <= now and not may_go_back

    def advance(self, index: int, now: float) -> Collection[StreamBatch]:
        """Runs the next possible pass of a stage; returns the shared global batches whose backward it ran."""
        stage = self.stages[index]
        k = stage.num_backwards
        if stage.free_at > now or k == len(self.clocks):
            return ()
        if stage.gradient_at[k] <= now:
            self._backward(stage, index, now)
            return self.shared[k] if self.shared and index == 0 else ()
        if self._may_forward(stage, index, now):
            self._forward(stage, index, now)
        return ()

    def _may_forward(self, stage: _Stage, index: int, now: float) -> bool:
        k = stage.num_forwards
        if k == len(self.clocks) or stage.activation_at[k] > now or self.waits_for[k] >= stage.num_backwards:
            return False
        if self.waits_for_norms and self.waits_for[k] >= 0 and self.step_ready_at(self.waits_for[k]) > now:
            return False
        if index == 0 and self.needs and any(self.whole_at.get(b, NEVER) > now for b in self.needs[k]):
            return False
        if self.max_lead is not None and k - stage.num_backwards >= self.max_lead[index]:
            return False
        held = stage.held + self.clocks[k].held_bytes[index]
        return self.memory_bytes is None or held <= self.memory_bytes[index]

    def _forward(self, stage: _Stage, index: int, now: float) -> None:
        k, clock = stage.num_forwards, self.clocks[stage.num_forwards]
        end = now + clock.forward_s[index]
        stage.passes.append(Pass(k, False, now, end))
        stage.num_forwards += 1
        stage.held += clock.held_bytes[index]
        if index + 1 < len(self.stages):
            self._arrive(self.stages[index + 1].activation_at, k, index + 1, end)
        else:
            stage.gradient_at[k] = end
        self._busy_until(stage, index, end)

    def _backward(self, stage: _Stage, index: int, now: float) -> None:
        k, clock = stage.num_backwards, self.clocks[stage.num_backwards]
        end = now + clock.backward_s[index]
        stage.passes.append(Pass(k, True, now, end))
        stage.backward_ends.append(end)
        stage.num_backwards += 1
        # No forward starts here before this backward ends, so its memory counts as free from now on.
        stage.held -= clock.held_bytes[index]
        if index > 0:
            self._arrive(self.stages[index - 1].gradient_at, k, index - 1, end)
        elif self.waits_for_norms:
            for other in range(1, len(self.stages)):
                heapq.heappush(self.wakes, (end, self.own, other))
        self._busy_until(stage, index, end + clock.step_s[index])

    def step_ready_at(self, k: int) -> float:
        first = self.stages[0]
        return first.backward_ends[k] if k < first.num_backwards else NEVER

    def _arrive(self, arrivals: list[float], k: int, index: int, sent_at: float) -> None:
        arrivals[k] = sent_at + self.clocks[k].transfer_s
        heapq.heappush(self.wakes, (arrivals[k], self.own, index))

    def _busy_until(self, stage: _Stage, index: int, end: float) -> None:
        stage.free_at = end
        heapq.heappush(self.wakes, (end, self.own, index))
