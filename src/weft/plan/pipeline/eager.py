"""Orders found by running the pipeline ahead of time: a stage never idles while anything it may do has arrived.

Problem: choose every stage's order to minimise the makespan, subject to: data flows from stage to stage and back, a
job's next global batch waits for its step on that stage, and what lies between forward and backward fits into memory.
Method: list scheduling over the cost model, O(stages × clocks × log). A stage that is free takes the first backward
that has arrived (it frees memory and lets a step come), else the next forward of the stream if memory and the jobs'
steps allow. Forwards, and hence backwards, keep the stream's order. No order can deadlock: the last stage's backward is
ready when its forward ends, so some stage always goes on if every clock fits alone. Several replicas are run ahead
side by side: where they share a global batch, none begins the next one before all have run the one before.
Bound: as some stage always computes or some transfer is under way, the makespan is at most all work and transfers in a
row; on N equal microbatches, each job's batches S or more apart, it is (N + S - 1)(forward + backward), the least.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from weft.plan.cost.learned import AdapterTimes
from weft.plan.cost.types import CostModel
from weft.plan.pipeline.orders import StageOrder, does_not_fit
from weft.plan.pipeline.stream import BatchStream
from weft.plan.program import Backward, Forward
from weft.plan.types import Microbatch

NEVER = float("inf")
SharedBatch = tuple[str, int]
"""Job and step."""


@dataclass(frozen=True, slots=True)
class Clock:
    """What goes through the pipeline together, and what that costs on every stage."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    held_bytes: tuple[int, ...]
    """Between forward and backward."""
    transfer_s: float
    """From one stage to the next, and back."""
    step_s: tuple[float, ...]
    """Optimizer steps behind its backward."""


@dataclass(frozen=True, slots=True)
class Pass:
    """A stage's next piece of work, and when it is expected to run."""

    clock: int
    is_backward: bool
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Pipe:
    """What goes through the stages of one replica."""

    clocks: Sequence[Clock]
    num_stages: int
    waits_for: Sequence[int]
    """Forward k comes after this backward on the same stage; -1: after none."""
    memory_bytes: Sequence[int] | None = None
    """What each stage has for clocks in flight."""
    max_lead: Sequence[int] | None = None
    """Most clocks that each stage has in flight."""
    shared: Sequence[Collection[SharedBatch]] = ()
    """The global batches of each clock that other replicas have samples of, too."""
    needs: Sequence[Collection[SharedBatch]] = ()
    """Those that must have been backward everywhere before each clock is forward."""
    waits_for_norms: bool = False
    """Whether a forward waits until the first stage, which judges steps, has gone back as far as it needs."""


@dataclass
class _Stage:
    """One stage while the pipeline is run ahead."""

    activation_at: list[float]
    """When each clock's input arrives."""
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
    """Orders of all stages; `max_lead` caps what a stage has in flight, in microbatches.

    `adapters`: what those of a microbatch's jobs add to what the cost model says of each pass.
    """
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
    """What every stage does, and when; forward k comes after backward `waits_for[k]` on the same stage."""
    for k, clock in enumerate(clocks):
        for place, limit in enumerate(memory_bytes or ()):
            if clock.held_bytes[place] > limit:
                raise does_not_fit(k, place, clock.held_bytes[place], limit)
    pipe = Pipe(clocks, num_stages, waits_for or [-1] * len(clocks), memory_bytes, max_lead)
    return play_all([pipe])[0]


def play_all(pipes: Sequence[Pipe]) -> list[list[list[Pass]]]:
    """The same of several replicas, by replica and stage."""
    left: Counter[SharedBatch] = Counter()
    for pipe in pipes:
        for batches in pipe.shared:
            left.update(batches)
    ends: dict[SharedBatch, float] = {}
    wakes = [(0.0, place, 0) for place in range(len(pipes))]
    plays = [Play(place, pipe, wakes) for place, pipe in enumerate(pipes)]
    while wakes:
        now, pipe_place, place = heapq.heappop(wakes)
        for batch in plays[pipe_place].advance(place, now):
            left[batch] -= 1
            ends[batch] = max(ends.get(batch, 0.0), plays[pipe_place].stages[place].free_at)
            if not left[batch]:
                for other, play in enumerate(plays):
                    play.whole_at[batch] = ends[batch]
                    heapq.heappush(wakes, (ends[batch], other, 0))
    for play in plays:
        assert all(stage.num_backwards == len(play.clocks) for stage in play.stages), "a stage waits for ever"
    return [[stage.passes for stage in play.stages] for play in plays]


def clock_of(
    microbatch: Microbatch, num_steps: int, num_stages: int, cost: CostModel, adapters: AdapterTimes | None = None
) -> Clock:
    """One microbatch; one without samples takes no time."""
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
    """One replica while all are run ahead."""

    def __init__(self, own: int, pipe: Pipe, wakes: list[tuple[float, int, int]]) -> None:
        self.own, self.wakes = own, wakes
        self.clocks, self.waits_for = list(pipe.clocks), list(pipe.waits_for)
        self.memory_bytes, self.max_lead = pipe.memory_bytes, pipe.max_lead
        self.shared, self.needs, self.waits_for_norms = list(pipe.shared), list(pipe.needs), pipe.waits_for_norms
        size = len(pipe.clocks)
        self.stages = [_Stage([0.0 if s == 0 else NEVER] * size, [NEVER] * size) for s in range(pipe.num_stages)]
        self.whole_at: dict[SharedBatch, float] = {}
        """When global batches that are shared have been backward everywhere."""

    def extend(
        self,
        clocks: Sequence[Clock],
        waits_for: Sequence[int],
        shared: Sequence[Collection[SharedBatch]],
        needs: Sequence[Collection[SharedBatch]],
    ) -> None:
        """More goes through the pipeline, behind all that does so far."""
        self.clocks += clocks
        self.waits_for += waits_for
        self.shared += shared
        self.needs += needs
        for place, stage in enumerate(self.stages):
            stage.activation_at += [0.0 if place == 0 else NEVER] * len(clocks)
            stage.gradient_at += [NEVER] * len(clocks)

    def has_run_out(self, now: float) -> bool:
        """Whether the first stage could run another forward now, if there were one."""
        first = self.stages[0]
        k = first.num_backwards
        may_go_back = k < len(self.clocks) and first.gradient_at[k] <= now
        return first.num_forwards == len(self.clocks) and first.free_at <= now and not may_go_back

    def advance(self, place: int, now: float) -> Collection[SharedBatch]:
        """Lets a stage do what it may; returns the shared global batches of what it then brings to its end."""
        stage = self.stages[place]
        k = stage.num_backwards
        if stage.free_at > now or k == len(self.clocks):
            return ()
        if stage.gradient_at[k] <= now:
            self._backward(stage, place, now)
            return self.shared[k] if self.shared and place == 0 else ()
        if self._may_forward(stage, place, now):
            self._forward(stage, place, now)
        return ()

    def _may_forward(self, stage: _Stage, place: int, now: float) -> bool:
        k = stage.num_forwards
        if k == len(self.clocks) or stage.activation_at[k] > now or self.waits_for[k] >= stage.num_backwards:
            return False
        if self.waits_for_norms and self.waits_for[k] >= 0 and self.step_ready_at(self.waits_for[k]) > now:
            return False
        if place == 0 and self.needs and any(self.whole_at.get(b, NEVER) > now for b in self.needs[k]):
            return False
        if self.max_lead is not None and k - stage.num_backwards >= self.max_lead[place]:
            return False
        held = stage.held + self.clocks[k].held_bytes[place]
        return self.memory_bytes is None or held <= self.memory_bytes[place]

    def _forward(self, stage: _Stage, place: int, now: float) -> None:
        k, clock = stage.num_forwards, self.clocks[stage.num_forwards]
        end = now + clock.forward_s[place]
        stage.passes.append(Pass(k, False, now, end))
        stage.num_forwards += 1
        stage.held += clock.held_bytes[place]
        if place + 1 < len(self.stages):
            self._arrive(self.stages[place + 1].activation_at, k, place + 1, end)
        else:
            stage.gradient_at[k] = end
        self._busy_until(stage, place, end)

    def _backward(self, stage: _Stage, place: int, now: float) -> None:
        k, clock = stage.num_backwards, self.clocks[stage.num_backwards]
        end = now + clock.backward_s[place]
        stage.passes.append(Pass(k, True, now, end))
        stage.backward_ends.append(end)
        stage.num_backwards += 1
        # No forward starts here before this backward ends, so its memory counts as free from now on.
        stage.held -= clock.held_bytes[place]
        if place > 0:
            self._arrive(self.stages[place - 1].gradient_at, k, place - 1, end)
        elif self.waits_for_norms:
            for other in range(1, len(self.stages)):
                heapq.heappush(self.wakes, (end, self.own, other))
        self._busy_until(stage, place, end + clock.step_s[place])

    def step_ready_at(self, k: int) -> float:
        """When the first stage has gone back through a clock."""
        first = self.stages[0]
        return first.backward_ends[k] if k < first.num_backwards else NEVER

    def _arrive(self, arrivals: list[float], k: int, place: int, sent_at: float) -> None:
        arrivals[k] = sent_at + self.clocks[k].transfer_s
        heapq.heappush(self.wakes, (arrivals[k], self.own, place))

    def _busy_until(self, stage: _Stage, place: int, end: float) -> None:
        stage.free_at = end
        heapq.heappush(self.wakes, (end, self.own, place))
