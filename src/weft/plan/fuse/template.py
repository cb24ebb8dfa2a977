"""The structured pipeline template: in which order buckets of fused tasks go through the stages.

All fused tasks of a bucket run one microbatch each within one clock of the pipeline. Problem: min makespan subject to
every stage holding at most its free bytes between forwards and backwards. Rules, in the spirit of 1F1B:

1. Buckets go by the time of a clock on the first stage, longest first: a shorter one fills the bubbles of a longer one.
2. The clocks of one bucket follow each other.
3. A stage runs a backward as soon as it is ready, and otherwise the next forward, as early as memory allows.

The stages are played through once with the cost model, O(S · clocks · log): the order each of them ends up with is the
template, a static program. A clock that fits alone is always reached, so there is no deadlock: whoever waits for memory
waits for a backward of an earlier clock, and the last stage runs backwards at once. Tests prove that memory stays in
its limits, and, for equal stages, forward = backward and enough memory, that the last stage never idles between its
first forward and its last backward.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weft.errors import PlanError
from weft.plan.fuse.tasks import FusedTask, Pipe

Interleave = Callable[[Sequence[float]], float]
"""Seconds of several fused tasks within one clock, from the seconds of each alone."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One microbatch of one fused task; launches of one clock follow each other."""

    clock: int
    bucket: int
    fused: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Pass:
    """A stage's next piece of work, and when it is expected to run."""

    clock: int
    is_backward: bool
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Template:
    """What enters the pipeline in which order, and how each stage orders its forwards and backwards."""

    buckets: tuple[tuple[int, ...], ...]
    """Fused tasks, by number, in the order the buckets run."""
    launches: tuple[Launch, ...]
    stages: tuple[tuple[Pass, ...], ...]
    peak_bytes: tuple[int, ...]
    """Most that each stage holds at a time."""

    @property
    def makespan_s(self) -> float:
        """When the last stage to end has done all."""
        return max(passes[-1].end_s for passes in self.stages)

    @property
    def bubble_ratio(self) -> float:
        """Idle part of all stages' time."""
        busy_s = sum(p.end_s - p.start_s for passes in self.stages for p in passes)
        return 1 - busy_s / (len(self.stages) * self.makespan_s)


@dataclass(frozen=True, slots=True)
class _Clock:
    """What one clock of a bucket costs; the same for all its microbatches."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    held_bytes: tuple[int, ...]
    transfer_s: float


def build_template(
    fused: Sequence[FusedTask], buckets: Sequence[Sequence[int]], pipe: Pipe, *, interleave: Interleave = sum
) -> Template:
    """The template of these buckets of fused tasks, for one global batch of every task."""
    costs = {bucket: _cost([fused[i] for i in bucket], pipe, interleave) for bucket in map(tuple, buckets)}
    if sorted(itertools.chain.from_iterable(costs)) != list(range(len(fused))):
        raise PlanError(
            f"buckets are {[list(b) for b in buckets]}; put each of {len(fused)} fused tasks in exactly one."
        )
    ordered = sorted(costs, key=lambda bucket: (-costs[bucket].forward_s[0], bucket))
    clocks = [(b, m) for b in range(len(ordered)) for m in range(pipe.num_microbatches)]
    launches = (Launch(clock, b, i, m) for clock, (b, m) in enumerate(clocks) for i in ordered[b])
    play = _Play([costs[ordered[b]] for b, _ in clocks], pipe)
    play.run()
    return Template(
        buckets=tuple(ordered),
        launches=tuple(launches),
        stages=tuple(tuple(passes) for passes in play.passes),
        peak_bytes=tuple(play.peak_bytes),
    )


def fits_alone(fused: Sequence[FusedTask], pipe: Pipe) -> bool:
    """True if one clock of these fused tasks fits on every stage."""
    held = _cost(fused, pipe, sum).held_bytes
    return pipe.free_bytes is None or all(h <= free for h, free in zip(held, pipe.free_bytes, strict=True))


def _cost(fused: Sequence[FusedTask], pipe: Pipe, interleave: Interleave) -> _Clock:
    stages = range(pipe.num_stages)
    return _Clock(
        forward_s=tuple(interleave([pipe.forward_s(f, s) for f in fused]) for s in stages),
        backward_s=tuple(interleave([pipe.backward_s(f, s) for f in fused]) for s in stages),
        held_bytes=tuple(sum(pipe.cost.held_bytes(f.lengths, s) for f in fused) for s in stages),
        transfer_s=pipe.cost.transfer_s(sum(f.num_tokens for f in fused)),
    )


class _Play:
    """Plays the stages through: each takes a ready backward first, else a forward it has memory for."""

    def __init__(self, clocks: Sequence[_Clock], pipe: Pipe) -> None:
        num_stages = pipe.num_stages
        self.clocks, self.num_stages, self.free_bytes = clocks, num_stages, pipe.free_bytes
        self.passes: list[list[Pass]] = [[] for _ in range(num_stages)]
        self.free_at = [0.0] * num_stages
        self.held_bytes, self.peak_bytes = [0] * num_stages, [0] * num_stages
        # When the input of each clock's forward, and the gradient for its backward, is there; in the order of clocks.
        self.inputs: list[list[float]] = [[0.0] * len(clocks), *([] for _ in range(num_stages - 1))]
        self.gradients: list[list[float]] = [[] for _ in range(num_stages)]
        self.num_forwards, self.num_backwards = [0] * num_stages, [0] * num_stages
        self.wakes: list[tuple[float, int]] = [(0.0, s) for s in range(num_stages)]
        self._check()

    def _check(self) -> None:
        for clock in self.clocks:
            for stage, free in enumerate(self.free_bytes or ()):
                if clock.held_bytes[stage] > free:
                    raise PlanError(
                        f"stage {stage} has {free} bytes free and one clock holds {clock.held_bytes[stage]}; "
                        "use more buckets or smaller microbatches."
                    )

    def run(self) -> None:
        """Until every clock has been forward and backward on every stage."""
        while self.wakes:
            now, stage = heapq.heappop(self.wakes)
            if self.free_at[stage] > now:
                continue
            backward, forward = self.num_backwards[stage], self.num_forwards[stage]
            if backward < len(self.gradients[stage]) and self.gradients[stage][backward] <= now:
                self._run_backward(stage, backward, now)
            elif forward < len(self.inputs[stage]) and self.inputs[stage][forward] <= now and self._has_room(stage):
                self._run_forward(stage, forward, now)
        assert all(n == len(self.clocks) for n in self.num_backwards), "a stage waits for ever"

    def _has_room(self, stage: int) -> bool:
        need = self.clocks[self.num_forwards[stage]].held_bytes[stage]
        return self.free_bytes is None or self.held_bytes[stage] + need <= self.free_bytes[stage]

    def _run_forward(self, stage: int, clock: int, now: float) -> None:
        cost = self.clocks[clock]
        self.held_bytes[stage] += cost.held_bytes[stage]
        self.peak_bytes[stage] = max(self.peak_bytes[stage], self.held_bytes[stage])
        self.num_forwards[stage] += 1
        end = self._occupy(stage, Pass(clock, False, now, now + cost.forward_s[stage]))
        if stage + 1 < self.num_stages:
            self._arrive(self.inputs, stage + 1, end + cost.transfer_s)
        else:
            self._arrive(self.gradients, stage, end)

    def _run_backward(self, stage: int, clock: int, now: float) -> None:
        cost = self.clocks[clock]
        # No forward starts here before this backward ends, so its memory counts as free from now on.
        self.held_bytes[stage] -= cost.held_bytes[stage]
        self.num_backwards[stage] += 1
        end = self._occupy(stage, Pass(clock, True, now, now + cost.backward_s[stage]))
        if stage > 0:
            self._arrive(self.gradients, stage - 1, end + cost.transfer_s)

    def _occupy(self, stage: int, work: Pass) -> float:
        self.passes[stage].append(work)
        self.free_at[stage] = work.end_s
        heapq.heappush(self.wakes, (work.end_s, stage))
        return work.end_s

    def _arrive(self, arrivals: list[list[float]], stage: int, when: float) -> None:
        # A smaller transfer does not overtake a larger one of the same direction.
        arrivals[stage].append(max(when, arrivals[stage][-1]) if arrivals[stage] else when)
        heapq.heappush(self.wakes, (arrivals[stage][-1], stage))
