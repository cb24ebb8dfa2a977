"""Continued programs: the next one is appended before the pipelines of the last one are empty.

A program that ends leaves its first stage with nothing but backwards, between which it idles, and the next one begins
with nothing but forwards. One long program would interleave them. So stages receive a program only up to the point
where the first stage could run the next forward; the rest is ordered together with the next program, by playing the
pipeline ahead over both (`orders.py`), or at the end. Playing ahead never looks forward: the issued instructions are
those that would have been issued had the next program been known from the beginning. No issued instruction waits for
one that has not been issued.

A job's step comes before its next forward, or as soon as its gradient norm arrives by the plan. Several replicas are
played ahead side by side, each until its own first stage has no forward left; only the steps of jobs that all of them
train connect them (`SharedSteps`).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from weft.plan.cost.learned import AdapterTimes, PassCosts
from weft.plan.cost.types import CostModel
from weft.plan.pipeline.build import StageList, renumbered
from weft.plan.pipeline.orders import Pass, Pipe, Play, clock_of, open_pipe
from weft.plan.pipeline.pair import together, uncut
from weft.plan.pipeline.stream import BatchStream, SharedSteps, StreamBatch, read_stream
from weft.plan.program import Backward, Forward, Instruction, Measure, Program, Step
from weft.plan.types import Microbatch

Lists = tuple[tuple[Instruction, ...], ...]


@dataclass(frozen=True)
class DealtStream:
    microbatches: Sequence[Microbatch]
    """Microbatches of the stream; two that run side by side count as one."""
    indices: Sequence[Sequence[int]]
    """Indices of each replica's microbatches, in the order of its forwards."""
    free: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Steps of the jobs that all replicas train."""
    parts: Sequence[int] = ()
    """Number of parts of each microbatch, one or two; empty: one each."""

    @classmethod
    def of(cls, program: Program) -> DealtStream:
        """The stream of a program, without the order of anything but forwards."""
        firsts = [program.stages[devices.start] for devices in program.replicas]
        parts = uncut(program)
        ends = itertools.accumulate(map(len, parts))
        index_of = {end - len(own): index for index, (end, own) in enumerate(zip(ends, parts, strict=True))}
        forwards = [[i.microbatch for i in own if isinstance(i, Forward)] for own in firsts]
        indices = [[index_of[k] for k in own if k in index_of] for own in forwards]
        steps = Counter((i.job, i.step) for own in firsts for i in own if isinstance(i, Step))
        free: dict[str, list[int]] = {}
        for job, step in sorted(batch for batch, count in steps.items() if count > 1):
            free.setdefault(job, []).append(step)
        return cls([together(own) for own in parts], indices, free, [len(own) for own in parts])

    @property
    def num_parts(self) -> int:
        return sum(self.parts) if self.parts else len(self.microbatches)

    def numbers(self, index: int, first: int) -> range:
        """The parts of one microbatch, counted from `first` on."""
        if not self.parts:
            return range(first + index, first + index + 1)
        start = first + sum(self.parts[:index])
        return range(start, start + self.parts[index])


class ContinuedProgram:
    """The lists of all stages of one or more replicas, program after program; microbatches are numbered throughout."""

    def __init__(self, *pipes: Pipe) -> None:
        self._wakes: list[tuple[float, int, int]] = []
        self._plays = [Play(replica, pipe, self._wakes) for replica, pipe in enumerate(pipes)]
        sizes = [pipe.num_stages for pipe in pipes]
        self._firsts = [0, *itertools.accumulate(sizes[:-1])]
        self._lists = [StageList(stage, size, measures=True) for size in sizes for stage in range(size)]
        self._pending: list[list[Instruction]] = [[] for _ in self._lists]
        self._shared = SharedSteps(self._firsts, self._pending)
        self._numbers: list[list[range]] = [[] for _ in pipes]
        self._programs: dict[StreamBatch, int] = {}
        self._ends: list[dict[StreamBatch, int]] = [{} for _ in pipes]
        self._newest: list[dict[str, StreamBatch]] = [{} for _ in pipes]
        self._free: set[str] = set()
        self._num_pending: list[int] = []
        """Steps of each program, counted on every stage, that have not been issued."""
        self.num_microbatches = 0

    @property
    def num_programs(self) -> int:
        return len(self._num_pending)

    def is_issued(self, program: int) -> bool:
        return not self._num_pending[program]

    def limit(self, pipes: Sequence[Pipe]) -> None:
        """Bounds what is in flight from now on as in these pipes."""
        for play, pipe in zip(self._plays, pipes, strict=True):
            play.memory_bytes, play.max_lead = pipe.memory_bytes, pipe.max_lead

    def append(self, given: DealtStream, costs: Sequence[PassCosts]) -> Lists:
        """Returns the next instructions: the rest of the program before, and the beginning of this one. Its
        microbatches hold whole global batches, each job's in order. `costs`: by replica."""
        streams = [read_stream([given.microbatches[k] for k in own]) for own in given.indices]
        before = self._shared.know(given.free, streams)
        self._free = (self._free - {job for stream in streams for job, _ in stream.members}) | given.free.keys()
        self._num_pending.append(len(self._lists) * sum(map(len, given.free.values())))
        for job, steps in given.free.items():
            for step, play in itertools.product(steps, self._plays):
                # Left over from an earlier job of that name.
                play.whole_at.pop((job, step), None)
        for replica, (stream, own) in enumerate(zip(streams, given.indices, strict=True)):
            self._extend(replica, stream, costs[replica], before)
            self._numbers[replica] += [given.numbers(k, self.num_microbatches) for k in own]
        self.num_microbatches += given.num_parts
        # Nothing follows on a replica without microbatches.
        return self._run([replica for replica, stream in enumerate(streams) if not stream.members])

    def end(self) -> Lists:
        """Returns the remaining instructions where nothing follows."""
        found = self._run(range(len(self._plays)))
        self._shared.end()
        return tuple((*new, *rest) for new, rest in zip(found, self._issue(), strict=True))

    def _extend(
        self, replica: int, stream: BatchStream, costs: PassCosts, before: Mapping[StreamBatch, StreamBatch]
    ) -> None:
        play, program = self._plays[replica], self.num_programs - 1
        waits_for, shift = self._waits_for(replica, stream), len(play.clocks)
        for batch in sorted(stream.members):
            self._programs[batch] = program
            self._ends[replica][batch] = shift + stream.members[batch][-1]
            self._newest[replica][batch[0]] = batch
            self._num_pending[program] += 0 if batch[0] in self._free else len(play.stages)
        first, size = self._firsts[replica], len(play.stages)
        for own in self._lists[first : first + size]:
            own.know(stream)
        num_steps = {k: len(batches) for k, batches in stream.completes.items()}
        shared = [self._shared_of(m) for m in stream.microbatches]
        play.extend(
            [clock_of(m, num_steps.get(k, 0), size, *costs) for k, m in enumerate(stream.microbatches)],
            waits_for,
            shared,
            [[before[batch] for batch in own if batch in before] for own in shared],
        )
        for index, stage in enumerate(play.stages):
            heapq.heappush(self._wakes, (stage.free_at, replica, index))
        for batch in {batch for own in play.needs[shift:] for batch in own} & play.whole_at.keys():
            heapq.heappush(self._wakes, (max(play.whole_at[batch], play.stages[0].free_at), replica, 0))

    def _shared_of(self, microbatch: Microbatch) -> list[StreamBatch]:
        return sorted({(s.job, s.step) for s in microbatch.segments if s.job in self._free})

    def _waits_for(self, replica: int, stream: BatchStream) -> list[int]:
        """The microbatch whose backward and steps each forward of a program needs."""
        shift, newest = len(self._plays[replica].clocks), self._newest[replica]
        found = [wait if wait < 0 else shift + wait for wait in stream.waits_for]
        begun = set[str]()
        for batch in sorted(stream.members):
            job = batch[0]
            if job not in begun and job in newest:
                before = self._ends[replica][newest[job]]
                for k in stream.members[batch]:
                    found[k] = max(found[k], before)
            begun.add(job)
        return found

    def _run(self, ending: Collection[int]) -> Lists:
        """Plays the pipelines ahead, the `ending` ones to their end, others until the next program would matter."""
        has_run_out, kept = set[int](), []
        while self._wakes:
            now, replica, stage = wake = heapq.heappop(self._wakes)
            if replica not in ending and (replica in has_run_out or self._plays[replica].has_run_out(now)):
                has_run_out.add(replica)
                kept.append(wake)
            else:
                self._advance(replica, stage, now)
        for wake in kept:
            heapq.heappush(self._wakes, wake)
        for replica in ending:
            for stage, _ in enumerate(self._plays[replica].stages):
                device = self._firsts[replica] + stage
                self._shared.step_until(device, math.inf, self._programs, self.num_programs - 1)
                self._pending[device] += self._lists[device].due()
        return self._issue()

    def _advance(self, replica: int, index: int, now: float) -> None:
        play = self._plays[replica]
        stage = play.stages[index]
        num_passes, ended = len(stage.passes), play.advance(index, now)
        for each in stage.passes[num_passes:]:
            self._schedule(replica, index, each)
        for batch in ended:
            whole_s = self._shared.backward_done(batch, stage.free_at)
            for other, waiting in enumerate(self._plays if whole_s is not None else ()):
                assert whole_s is not None
                waiting.whole_at[batch] = whole_s
                # Its clock may be further: it may have had more to do than the slower replica.
                heapq.heappush(self._wakes, (max(whole_s, waiting.stages[0].free_at), other, 0))

    def _schedule(self, replica: int, index: int, each: Pass) -> None:
        device, shared = self._firsts[replica] + index, self._shared
        own, pending = self._lists[device], self._pending[device]
        visited = own.visited(Backward(each.clock) if each.is_backward else Forward(each.clock))
        for job in self._free & own.measured.keys():
            del own.measured[job]
        shared.step_until(device, each.start_s, self._programs, self.num_programs - 1)
        if index == 0:
            shared.compute_steps_until(replica, each.start_s)
        pending += own.due(self._overdue(replica, own, each))
        numbers, first = self._numbers[replica], self._firsts[replica]
        for i in visited:
            match i:
                case Step(job) if job in self._free:
                    continue
                case Measure(job, step) if job in self._free and index == 0 and shared.is_root(replica, (job, step)):
                    continue
                case Forward(k):
                    for batch in self._plays[replica].shared[k]:
                        shared.step_before(device, batch)
            pending += renumbered(i, numbers, first)

    def _overdue(self, replica: int, own: StageList, each: Pass) -> list[str]:
        play, ends = self._plays[replica], self._ends[replica]
        found = []
        for job, step in sorted(own.measured.items()):
            is_older = self._programs[job, step] + 1 < self.num_programs
            if is_older and play.step_ready_at(ends[job, step]) <= each.start_s:
                found.append(job)
        return found

    def _issue(self) -> Lists:
        found = tuple(map(tuple, self._pending))
        for pending in self._pending:
            pending.clear()
        for i in itertools.chain.from_iterable(found):
            if isinstance(i, Step):
                self._num_pending[self._programs[i.job, i.step]] -= 1
        return found


def joined(
    streams: Sequence[Sequence[Microbatch]],
    num_stages: int,
    cost: CostModel,
    *,
    memory_bytes: Sequence[int] | None = None,
    adapters: AdapterTimes | None = None,
) -> Program:
    """One program of several streams on one replica, each appended to the one before."""
    given = [DealtStream(stream, [range(len(stream))]) for stream in streams]
    return joined_all(given, [open_pipe(num_stages, memory_bytes)], [(cost, adapters)])


def joined_all(given: Sequence[DealtStream], pipes: Sequence[Pipe], costs: Sequence[PassCosts]) -> Program:
    endless = ContinuedProgram(*pipes)
    parts = [*(endless.append(stream, costs) for stream in given), endless.end()]
    stages = tuple(tuple(i for part in own for i in part) for own in zip(*parts, strict=True))
    sizes = tuple(pipe.num_stages for pipe in pipes)
    microbatches = tuple(microbatch for stream in given for microbatch in stream.microbatches)
    return Program(microbatches, stages, replica_sizes=sizes if len(sizes) > 1 else ())
