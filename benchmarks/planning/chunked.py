"""Programs in which long samples are cut into chunks that reuse keys and values, to be simulated: no run trains one.

Chunks of a sample go forward in order, each through all stages, and backward in reverse order: what later chunks give
to the keys and values of earlier ones must be complete before these go backward. So a stage holds all chunks of a
sample at once, as it holds a whole sample today.

A chunk costs what its rows cost, the attention of its queries to the earlier rows, which in sum is that of the whole
sample, and these, which are *assumed*: its earlier keys and values read once more per pass, and the fp32 sums of their
gradients, of which every chunk reads and writes the earlier part. They are held as long as their rows. With
`recompute: full` a stage keeps the keys and values as well.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from weft.errors import PlanError
from weft.plan.cost.analytic import AnalyticCost
from weft.plan.cost.learned import AdapterTimes
from weft.plan.cost.types import CostModel
from weft.plan.pipeline.build import with_transfers
from weft.plan.pipeline.orders import NEVER, StageOrder, clock_of
from weft.plan.pipeline.stream import BatchStream, StreamBatch, read_stream
from weft.plan.program import Backward, Forward, Program
from weft.plan.types import Microbatch, Segment

SUM_BYTES = 4
"""Of a gradient of keys or values, summed over chunks: fp32, assumed."""


class Chunk(int):
    """Length of a part of a sample whose `before` earlier tokens are in earlier microbatches."""

    before: int

    @classmethod
    def of(cls, length: int, before: int) -> Chunk:
        found = cls(length)
        found.before = before
        return found


@dataclass(frozen=True)
class ChunkCost:
    """A `CostModel` that knows chunks; whole samples cost what they cost without it."""

    cost: AnalyticCost
    offload: bool = False
    """Whether the large tensors that are kept are in host memory, but for two layers; without loss of time, *assumed*
    from one GPU, where it was measured."""
    known: dict[tuple[object, ...], float] = field(default_factory=dict, compare=False)
    known_bytes: dict[tuple[int, int], int] = field(default_factory=dict, compare=False)

    def forward_s(self, lengths: Sequence[int], stage: int) -> float:
        return self._pass_s(lengths, stage, is_forward=True)

    def backward_s(self, lengths: Sequence[int], stage: int) -> float:
        return self._pass_s(lengths, stage, is_forward=False)

    def transfer_s(self, num_tokens: int) -> float:
        return self.cost.transfer_s(num_tokens)

    def step_s(self, stage: int) -> float:
        return self.cost.step_s(stage)

    def held_bytes(self, lengths: Sequence[int], stage: int) -> int:
        each = SUM_BYTES + (self.cost.hardware.activation_bytes if self.cost.recompute == "full" else 0)
        key, rows = (sum(lengths), stage), sum(n for n in lengths if isinstance(n, Chunk))
        if key not in self.known_bytes:
            memory, kept = self.cost.memory, self.cost.held_bytes(lengths, stage)
            moved = memory.offloaded_bytes(self.cost.rows(lengths)) * memory.layers(stage) // memory.layers(0)
            self.known_bytes[key] = kept - moved * self.offload
        return self.known_bytes[key] + self.cost.memory.layers(stage) * self._numbers(rows) * each

    def _numbers(self, rows: int) -> int:
        """Keys and values of so many rows in one layer."""
        return rows * 2 * self.cost.shape.num_kv_heads * self.cost.shape.head_size

    def _pass_s(self, lengths: Sequence[int], stage: int, *, is_forward: bool) -> float:
        earlier = tuple(n.before if isinstance(n, Chunk) else 0 for n in lengths)
        key = (tuple(map(int, lengths)), earlier, stage, is_forward)
        if key not in self.known:
            whole_s = (self.cost.forward_s if is_forward else self.cost.backward_s)(lengths, stage)
            chunks = [(int(n), before) for n, before in zip(lengths, earlier, strict=True) if before]
            added_s = sum(self._added_s(*chunk, is_forward=is_forward) for chunk in chunks)
            self.known[key] = whole_s + self.cost.memory.layers(stage) * added_s
        return self.known[key]

    def _added_s(self, length: int, before: int, *, is_forward: bool) -> float:
        """Of one layer: earlier keys and values, in attention and in memory."""
        found = 0.0
        for forward in [True] if is_forward else [False] + [True] * (self.cost.recompute == "full"):
            whole, *parts = (
                self.cost.layer([n], is_forward=forward).attention for n in (before + length, before, length)
            )
            moved = self.cost.hardware.activation_bytes + (0 if forward else 2 * SUM_BYTES)
            found += whole - sum(parts) + self._numbers(before) * moved / self.cost.hardware.memory_rate
        return found


@dataclass(frozen=True)
class CutStream:
    microbatches: tuple[Microbatch, ...]
    goes_on: tuple[bool, ...]
    """Whether the last sample of a microbatch goes on in the next one."""

    @property
    def backward_order(self) -> list[int]:
        """The stream's order, but in reverse where samples go on."""
        found, first = list[int](), 0
        for k, goes_on in enumerate(self.goes_on):
            if not goes_on:
                found += range(k, first - 1, -1)
                first = k + 1
        return found


def cut(stream: Sequence[Microbatch], most: int, *, in_chunks: bool) -> CutStream:
    """Microbatches of at most `most` tokens, in the same order. Without chunks, longer samples stay whole, alone."""
    found, goes_on = list[Microbatch](), list[bool]()
    for microbatch in stream:
        pieces: list[list[Segment]] = [[]]
        going: set[int] = set()
        for s in microbatch.segments:
            is_cut, room = in_chunks and s.length > most, most - sum(own.length for own in pieces[-1])
            if room <= 0 or (pieces[-1] and s.length > room and not is_cut):
                pieces.append([])
                room = most
            if not is_cut:
                pieces[-1].append(s)
                continue
            for before, end in itertools.pairwise([0, *range(room, s.length, most), s.length]):
                if before:
                    going.add(len(pieces) - 1)
                    pieces.append([])
                pieces[-1].append(replace(s, length=Chunk.of(end - before, before)))
        found += [Microbatch(tuple(piece)) for piece in pieces]
        goes_on += [number in going for number, _ in enumerate(pieces)]
    return CutStream(tuple(found), tuple(goes_on))


def build_cut(
    stream: CutStream,
    num_stages: int,
    cost: CostModel,
    memory_bytes: Sequence[int] | None = None,
    adapters: AdapterTimes | None = None,
) -> Program:
    """The program of `Schedule.EAGER` for a stream whose backwards have an order of their own."""
    read = read_stream(stream.microbatches)
    orders = _Play(read, stream.backward_order, num_stages, cost, memory_bytes, adapters).orders()
    stages = (tuple(with_transfers(read, own, s, num_stages, measures=num_stages > 1)) for s, own in enumerate(orders))
    return Program(read.microbatches, tuple(stages))


class _Play:
    """Plays a pipeline ahead as `plan/pipeline/orders.py` does: backwards first, forwards as far as memory allows."""

    def __init__(
        self,
        stream: BatchStream,
        backward_order: Sequence[int],
        num_stages: int,
        cost: CostModel,
        memory_bytes: Sequence[int] | None,
        adapters: AdapterTimes | None,
    ) -> None:
        self.backward_order, self.memory_bytes, size = backward_order, memory_bytes, len(backward_order)
        turn = {k: number for number, k in enumerate(backward_order)}
        ends = {batch: max(turn[k] for k in ks) for batch, ks in stream.members.items()}
        steps = Counter(ends.values())
        self.clocks = [
            clock_of(m, steps[turn[k]], num_stages, cost, adapters) for k, m in enumerate(stream.microbatches)
        ]
        self.waits_for = _waits(stream, ends)
        self.activation_at = [[0.0 if s == 0 else NEVER] * size for s in range(num_stages)]
        self.gradient_at = [[NEVER] * size for _ in range(num_stages)]
        self.free_at, self.held = [0.0] * num_stages, [0] * num_stages
        self.found: list[StageOrder] = [[] for _ in range(num_stages)]
        self.num_forwards, self.num_backwards = [0] * num_stages, [0] * num_stages
        self.wakes = [(0.0, 0)]

    def orders(self) -> list[StageOrder]:
        while self.wakes:
            now, stage = heapq.heappop(self.wakes)
            if self.free_at[stage] <= now:
                self._advance(stage, now)
        if min(self.num_backwards) < len(self.clocks):
            raise PlanError("a stage has no memory for all chunks of a sample; give it more, or more stages.")
        return self.found

    def _advance(self, stage: int, now: float) -> None:
        number, k = self.num_backwards[stage], self.num_forwards[stage]
        if number < len(self.clocks) and self.gradient_at[stage][self.backward_order[number]] <= now:
            self._backward(stage, self.backward_order[number], now)
        elif k < len(self.clocks) and self.activation_at[stage][k] <= now and self._may_forward(stage, k):
            self._forward(stage, k, now)

    def _may_forward(self, stage: int, k: int) -> bool:
        held = self.held[stage] + self.clocks[k].held_bytes[stage]
        has_room = self.memory_bytes is None or held <= self.memory_bytes[stage]
        return has_room and self.waits_for[k] < self.num_backwards[stage]

    def _forward(self, stage: int, k: int, now: float) -> None:
        clock = self.clocks[k]
        end = now + clock.forward_s[stage]
        self.found[stage].append(Forward(k))
        self.num_forwards[stage] += 1
        self.held[stage] += clock.held_bytes[stage]
        if stage + 1 < len(self.found):
            self._arrive(self.activation_at, stage + 1, k, end + clock.transfer_s)
        else:
            self.gradient_at[stage][k] = end
        self._busy_until(stage, end)

    def _backward(self, stage: int, k: int, now: float) -> None:
        clock = self.clocks[k]
        end = now + clock.backward_s[stage]
        self.found[stage].append(Backward(k))
        self.num_backwards[stage] += 1
        self.held[stage] -= clock.held_bytes[stage]
        if stage:
            self._arrive(self.gradient_at, stage - 1, k, end + clock.transfer_s)
        self._busy_until(stage, end + clock.step_s[stage])

    def _arrive(self, arrivals: list[list[float]], stage: int, k: int, at: float) -> None:
        arrivals[stage][k] = at
        heapq.heappush(self.wakes, (at, stage))

    def _busy_until(self, stage: int, end: float) -> None:
        self.free_at[stage] = end
        heapq.heappush(self.wakes, (end, stage))


def _waits(stream: BatchStream, ends: dict[StreamBatch, int]) -> list[int]:
    """The number of the backward that must end before each forward; -1 for none."""
    found = [-1] * len(stream.microbatches)
    for before, batch in itertools.pairwise(sorted(stream.members)):
        for k in stream.members[batch] if before[0] == batch[0] else ():
            found[k] = max(found[k], ends[before])
    return found
