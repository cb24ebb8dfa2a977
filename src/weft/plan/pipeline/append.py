"""Programs that go on: the next one is appended before the pipelines of the one before are empty.

A program that ends leaves its first stage with nothing but backwards, between which it idles, and the next one begins
with nothing but forwards. One long program would do both in turn. So stages are told of a program only what they do
until the first stage would run the next forward if there were one; the rest waits for the next program, and is found by
running the pipeline ahead over both (`eager.py`), or for the end. What is run ahead never looks forward: all that
stages have been told is what they would have been told had the next program been known from the beginning. What a stage
has been told never waits for what another has not been told.

A job's step comes before its next forward, or as soon as the verdict about it is there by the plan. Several replicas
are run ahead side by side, each until its own first stage has no forward left; they have nothing to do with each other
but for the steps of jobs that all of them train (`shared_steps.py`).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from weft.plan.cost.learned import AdapterTimes
from weft.plan.cost.types import CostModel
from weft.plan.pair import together, uncut
from weft.plan.pipeline.build import StageList, renumbered
from weft.plan.pipeline.eager import Pass, Pipe, Play, clock_of
from weft.plan.pipeline.shared_steps import SharedSteps
from weft.plan.pipeline.stream import BatchStream, StreamBatch, read_stream
from weft.plan.program import Backward, Forward, Instruction, Measure, Program, Step
from weft.plan.types import Microbatch

Lists = tuple[tuple[Instruction, ...], ...]
"""What every stage is told."""
PassCosts = tuple[CostModel, AdapterTimes | None]
"""What passes are taken to cost on a replica."""


@dataclass(frozen=True)
class DealtStream:
    """What a program has replicas run."""

    microbatches: Sequence[Microbatch]
    """Two that run side by side count as one."""
    places: Sequence[Sequence[int]]
    """Of each replica, which of them it runs, in the order of its forwards."""
    free: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """The steps of the jobs that all replicas train."""
    parts: Sequence[int] = ()
    """Of how many each of them is made, one or two; empty: of one."""

    @classmethod
    def of(cls, program: Program) -> DealtStream:
        """What a program says, but for the order of everything else."""
        firsts = [program.stages[devices.start] for devices in program.replicas]
        parts = uncut(program)
        ends = itertools.accumulate(map(len, parts))
        place_of = {end - len(own): place for place, (end, own) in enumerate(zip(ends, parts, strict=True))}
        forwards = [[i.microbatch for i in own if isinstance(i, Forward)] for own in firsts]
        places = [[place_of[k] for k in own if k in place_of] for own in forwards]
        steps = Counter((i.job, i.step) for own in firsts for i in own if isinstance(i, Step))
        free: dict[str, list[int]] = {}
        for job, step in sorted(batch for batch, count in steps.items() if count > 1):
            free.setdefault(job, []).append(step)
        return cls([together(own) for own in parts], places, free, [len(own) for own in parts])

    @property
    def num_parts(self) -> int:
        """Of all of them."""
        return sum(self.parts) if self.parts else len(self.microbatches)

    def numbers(self, place: int, first: int) -> range:
        """Of the parts of one of them, where those of the program are counted from `first` on."""
        if not self.parts:
            return range(first + place, first + place + 1)
        start = first + sum(self.parts[:place])
        return range(start, start + self.parts[place])


def open_pipe(
    num_stages: int, memory_bytes: Sequence[int] | None = None, max_lead: Sequence[int] | None = None
) -> Pipe:
    """A replica of so many stages, with so much memory for what is in flight, or so many microbatches of it."""
    return Pipe((), num_stages, (), memory_bytes, max_lead, waits_for_norms=True)


class ContinuedProgram:
    """The lists of all stages of one or more replicas, program after program; all microbatches are counted."""

    def __init__(self, *pipes: Pipe) -> None:
        """`pipes`: of each replica, with nothing in it yet."""
        self._wakes: list[tuple[float, int, int]] = []
        self._plays = [Play(replica, pipe, self._wakes) for replica, pipe in enumerate(pipes)]
        sizes = [pipe.num_stages for pipe in pipes]
        self._firsts = [0, *itertools.accumulate(sizes[:-1])]
        self._lists = [StageList(place, size, measures=True) for size in sizes for place in range(size)]
        self._told: list[list[Instruction]] = [[] for _ in self._lists]
        """What each stage is told next."""
        self._shared = SharedSteps(self._firsts, self._told)
        self._numbers: list[list[range]] = [[] for _ in pipes]
        """Of each replica's microbatches among all; two where it runs two side by side."""
        self._programs: dict[StreamBatch, int] = {}
        """The program that each global batch belongs to."""
        self._ends: list[dict[StreamBatch, int]] = [{} for _ in pipes]
        """The last microbatch that each replica has of it."""
        self._newest: list[dict[str, StreamBatch]] = [{} for _ in pipes]
        """The last global batch of each job."""
        self._free: set[str] = set()
        self._num_untold: list[int] = []
        """Steps of each program, counted on every stage, that have not been told."""
        self.num_microbatches = 0
        """Of all programs so far."""

    @property
    def num_programs(self) -> int:
        """So far."""
        return len(self._num_untold)

    def is_issued(self, program: int) -> bool:
        """Whether stages have been told all of a program, by its number."""
        return not self._num_untold[program]

    def append(self, given: DealtStream, costs: Sequence[PassCosts]) -> Lists:
        """What the stages do next: the rest of the program before, and the beginning of this one.

        Its microbatches hold whole global batches, each job's in order. `costs`: of each replica.
        """
        streams = [read_stream([given.microbatches[k] for k in places]) for places in given.places]
        before = self._shared.know(given.free, streams)
        self._free = (self._free - {job for stream in streams for job, _ in stream.members}) | given.free.keys()
        self._num_untold.append(len(self._lists) * sum(map(len, given.free.values())))
        for job, steps in given.free.items():
            for step, play in itertools.product(steps, self._plays):
                # Of an earlier job of that name.
                play.whole_at.pop((job, step), None)
        for replica, (stream, places) in enumerate(zip(streams, given.places, strict=True)):
            self._extend(replica, stream, costs[replica], before)
            self._numbers[replica] += [given.numbers(k, self.num_microbatches) for k in places]
        self.num_microbatches += given.num_parts
        # Nothing follows on a replica that has no part of it.
        return self._run([replica for replica, stream in enumerate(streams) if not stream.members])

    def end(self) -> Lists:
        """What is left to do where nothing follows."""
        found = self._run(range(len(self._plays)))
        self._shared.end()
        return tuple((*told, *rest) for told, rest in zip(found, self._taken(), strict=True))

    def _extend(
        self, replica: int, stream: BatchStream, costs: PassCosts, before: Mapping[StreamBatch, StreamBatch]
    ) -> None:
        """Puts a program's microbatches of a replica behind all others."""
        play, program = self._plays[replica], self.num_programs - 1
        waits_for, shift = self._waits_for(replica, stream), len(play.clocks)
        for batch in sorted(stream.members):
            self._programs[batch] = program
            self._ends[replica][batch] = shift + stream.members[batch][-1]
            self._newest[replica][batch[0]] = batch
            self._num_untold[program] += 0 if batch[0] in self._free else len(play.stages)
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
        for place, stage in enumerate(play.stages):
            heapq.heappush(self._wakes, (stage.free_at, replica, place))
        for batch in {batch for own in play.needs[shift:] for batch in own} & play.whole_at.keys():
            heapq.heappush(self._wakes, (max(play.whole_at[batch], play.stages[0].free_at), replica, 0))

    def _shared_of(self, microbatch: Microbatch) -> list[StreamBatch]:
        return sorted({(s.job, s.step) for s in microbatch.segments if s.job in self._free})

    def _waits_for(self, replica: int, stream: BatchStream) -> list[int]:
        """The microbatch whose backward, and steps, each forward of a program needs."""
        shift, newest = len(self._plays[replica].clocks), self._newest[replica]
        found = [wait if wait < 0 else shift + wait for wait in stream.waits_for]
        begun = set[str]()
        for batch in sorted(stream.members):
            job = batch[0]
            if job not in begun and job in newest:
                before = self._ends[replica][newest[job]]
                for place in stream.members[batch]:
                    found[place] = max(found[place], before)
            begun.add(job)
        return found

    def _run(self, ending: Collection[int]) -> Lists:
        """Runs the pipelines ahead, those that are `ending` to their end, the others until more would matter."""
        has_run_out, kept = set[int](), []
        while self._wakes:
            now, replica, place = wake = heapq.heappop(self._wakes)
            if replica not in ending and (replica in has_run_out or self._plays[replica].has_run_out(now)):
                has_run_out.add(replica)
                kept.append(wake)
            else:
                self._advance(replica, place, now)
        for wake in kept:
            heapq.heappush(self._wakes, wake)
        for replica in ending:
            for place, _ in enumerate(self._plays[replica].stages):
                device = self._firsts[replica] + place
                self._shared.step_until(device, math.inf, self._programs, self.num_programs - 1)
                self._told[device] += self._lists[device].due()
        return self._taken()

    def _advance(self, replica: int, place: int, now: float) -> None:
        play = self._plays[replica]
        stage = play.stages[place]
        num_passes, ended = len(stage.passes), play.advance(place, now)
        for each in stage.passes[num_passes:]:
            self._tell(replica, place, each)
        for batch in ended:
            whole_s = self._shared.backward_done(batch, stage.free_at)
            for other, waiting in enumerate(self._plays if whole_s is not None else ()):
                assert whole_s is not None
                waiting.whole_at[batch] = whole_s
                # Its clock may be further: it may have had more to do than the one that was behind.
                heapq.heappush(self._wakes, (max(whole_s, waiting.stages[0].free_at), other, 0))

    def _tell(self, replica: int, place: int, each: Pass) -> None:
        """Tells a stage a pass, and what comes before it."""
        device, shared = self._firsts[replica] + place, self._shared
        own, told = self._lists[device], self._told[device]
        visited = own.visited(Backward(each.clock) if each.is_backward else Forward(each.clock))
        for job in self._free & own.measured.keys():
            del own.measured[job]
        shared.step_until(device, each.start_s, self._programs, self.num_programs - 1)
        if place == 0:
            shared.compute_steps_until(replica, each.start_s)
        told += own.due(self._overdue(replica, own, each))
        numbers, first = self._numbers[replica], self._firsts[replica]
        for i in visited:
            match i:
                case Step(job) if job in self._free:
                    continue
                case Measure(job, step) if job in self._free and place == 0 and shared.is_root(replica, (job, step)):
                    continue
                case Forward(k):
                    for batch in self._plays[replica].shared[k]:
                        shared.step_before(device, batch)
            told += renumbered(i, numbers, first)

    def _overdue(self, replica: int, own: StageList, each: Pass) -> list[str]:
        """Jobs whose steps of programs before are taken before a pass."""
        play, ends = self._plays[replica], self._ends[replica]
        found = []
        for job, step in sorted(own.measured.items()):
            is_older = self._programs[job, step] + 1 < self.num_programs
            if is_older and play.step_ready_at(ends[job, step]) <= each.start_s:
                found.append(job)
        return found

    def _taken(self) -> Lists:
        """What stages have not been told, which they are now."""
        found = tuple(map(tuple, self._told))
        for told in self._told:
            told.clear()
        for i in itertools.chain.from_iterable(found):
            if isinstance(i, Step):
                self._num_untold[self._programs[i.job, i.step]] -= 1
        return found


def joined(
    streams: Sequence[Sequence[Microbatch]],
    num_stages: int,
    cost: CostModel,
    *,
    memory_bytes: Sequence[int] | None = None,
    adapters: AdapterTimes | None = None,
) -> Program:
    """One program of several streams, each appended to the one before, for one replica."""
    given = [DealtStream(stream, [range(len(stream))]) for stream in streams]
    return joined_all(given, [open_pipe(num_stages, memory_bytes)], [(cost, adapters)])


def joined_all(given: Sequence[DealtStream], pipes: Sequence[Pipe], costs: Sequence[PassCosts]) -> Program:
    """The same for any number of replicas."""
    endless = ContinuedProgram(*pipes)
    parts = [*(endless.append(stream, costs) for stream in given), endless.end()]
    stages = tuple(tuple(i for part in own for i in part) for own in zip(*parts, strict=True))
    sizes = tuple(pipe.num_stages for pipe in pipes)
    microbatches = tuple(microbatch for stream in given for microbatch in stream.microbatches)
    return Program(microbatches, stages, replica_sizes=sizes if len(sizes) > 1 else ())
