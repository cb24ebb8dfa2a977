"""Programs that go on: the next one is appended before the pipeline of the one before is empty.

A program that ends leaves its first stage with nothing but backwards, between which it idles, and the next one begins
with nothing but forwards. One long program would do both in turn. So stages are told of a program only what they do
until the first stage would run the next forward if there were one; the rest waits for the next program, and is found by
running the pipeline ahead over both (`eager.py`), or for the end. What is run ahead never looks forward: all that
stages have been told is what they would have been told had the next program been known from the beginning. What a stage
has been told never waits for what another has not been told.

A job's step comes before its next forward, or as soon as the verdict about it is there by the plan. All steps of a
program come before those of the next.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence

from weft.cost.adapter_times import AdapterTimes
from weft.cost.types import CostModel
from weft.plan.pipeline.build import StageList
from weft.plan.pipeline.eager import Pass, Pipe, Play, clock_of
from weft.plan.pipeline.stream import BatchStream, StreamBatch, read_stream
from weft.plan.program import Backward, Forward, Instruction, Program, Step
from weft.plan.types import Microbatch

Lists = tuple[tuple[Instruction, ...], ...]
"""What every stage is told."""


class EndlessProgram:
    """The lists of all stages of one replica, program after program; microbatches are counted through all of them."""

    def __init__(self, num_stages: int, memory_bytes: Sequence[int] | None = None) -> None:
        """`memory_bytes`: what each stage has for microbatches in flight."""
        self.num_stages = num_stages
        self._wakes: list[tuple[float, int, int]] = []
        self._play = Play(0, Pipe((), num_stages, (), memory_bytes, knows_verdicts=True), self._wakes)
        self._lists = [StageList(stage, num_stages, measures=True) for stage in range(num_stages)]
        self._num_told = [0] * num_stages
        """Passes of each stage that it has been told."""
        self._programs: dict[StreamBatch, int] = {}
        """The program that each global batch belongs to."""
        self._ends: dict[StreamBatch, int] = {}
        """Its last microbatch."""
        self._newest: dict[str, StreamBatch] = {}
        """The last global batch of each job."""
        self._num_untold: list[int] = []
        """Steps of each program, counted on every stage, that have not been told."""

    @property
    def num_programs(self) -> int:
        """So far."""
        return len(self._num_untold)

    def has_told(self, program: int) -> bool:
        """Whether stages have been told all of a program, by its number."""
        return not self._num_untold[program]

    @property
    def num_microbatches(self) -> int:
        """Of all programs so far."""
        return len(self._play.clocks)

    def append(
        self, microbatches: Sequence[Microbatch], cost: CostModel, adapters: AdapterTimes | None = None
    ) -> Lists:
        """What the stages do next: the rest of the program before, and the beginning of this one.

        `microbatches` hold whole global batches, each job's in order.
        """
        stream = read_stream(microbatches)
        waits_for = self._waits_for(stream)
        for batch in sorted(stream.members):
            self._programs[batch] = self.num_programs
            self._ends[batch] = self.num_microbatches + stream.members[batch][-1]
            self._newest[batch[0]] = batch
        self._num_untold.append(self.num_stages * len(stream.members))
        for own in self._lists:
            own.know(stream)
        num_steps = {k: len(batches) for k, batches in stream.completes.items()}
        clocks = [clock_of(m, num_steps.get(k, 0), self.num_stages, cost, adapters) for k, m in enumerate(microbatches)]
        self._play.extend(clocks, waits_for)
        for place, stage in enumerate(self._play.stages):
            heapq.heappush(self._wakes, (stage.free_at, 0, place))
        return self._told(ends=False)

    def end(self) -> Lists:
        """What is left to do where nothing follows."""
        found = self._told(ends=True)
        rest = [own.due(self._in_order(own)) for own in self._lists]
        self._note_told(itertools.chain.from_iterable(rest))
        return tuple((*told, *own) for told, own in zip(found, rest, strict=True))

    def _waits_for(self, stream: BatchStream) -> list[int]:
        """The microbatch whose backward, and steps, each forward of a program needs."""
        shift = self.num_microbatches
        found = [wait if wait < 0 else shift + wait for wait in stream.waits_for]
        begun = set[str]()
        for batch in sorted(stream.members):
            job = batch[0]
            if job not in begun and job in self._newest:
                before = self._ends[self._newest[job]]
                for place in stream.members[batch]:
                    found[place] = max(found[place], before)
            begun.add(job)
        return found

    def _told(self, *, ends: bool) -> Lists:
        """Runs the pipeline ahead, to its end or until more would make a difference."""
        while self._wakes:
            now, _, place = self._wakes[0]
            if not ends and self._play.has_run_out(now):
                break
            heapq.heappop(self._wakes)
            self._play.advance(place, now)
        return tuple(tuple(self._instructions(stage)) for stage in range(self.num_stages))

    def _instructions(self, stage: int) -> list[Instruction]:
        own, passes = self._lists[stage], self._play.stages[stage].passes
        found: list[Instruction] = []
        for each in passes[self._num_told[stage] :]:
            visited = own.visited(Backward(each.clock) if each.is_backward else Forward(each.clock))
            asked = [i for i in visited if isinstance(i, Step)]
            overdue = own.due(self._overdue(own, each, asked))
            oldest = min(map(self._program_of, asked), default=self.num_programs)
            found += [step for step in overdue if self._program_of(step) <= oldest]
            # Those of newer programs come among those that the pass asks for.
            late = [step for step in overdue if self._program_of(step) > oldest]
            before = visited[: visited.index(asked[0])] if asked else []
            found += [*before, *sorted([*asked, *late], key=self._program_of)]
            found += [i for i in visited[len(before) :] if not isinstance(i, Step)]
        self._num_told[stage] = len(passes)
        self._note_told(found)
        return found

    def _program_of(self, step: Step) -> int:
        return self._programs[step.job, step.step]

    def _note_told(self, instructions: Iterable[Instruction]) -> None:
        for i in instructions:
            if isinstance(i, Step):
                self._num_untold[self._program_of(i)] -= 1

    def _in_order(self, own: StageList) -> list[str]:
        """Jobs whose steps are due on a stage, those of older programs first."""
        return sorted(own.measured, key=lambda job: (self._programs[job, own.measured[job]], job))

    def _overdue(self, own: StageList, each: Pass, asked: Sequence[Step]) -> list[str]:
        """Jobs whose steps of programs before are taken before a pass."""
        newest = max(map(self._program_of, asked), default=-1)
        found = []
        for job in self._in_order(own):
            step = own.measured[job]
            number = self._programs[job, step]
            is_judged = self._play.judged_at(self._ends[job, step]) <= each.start_s
            if number < newest or (number + 1 < self.num_programs and is_judged):
                found.append(job)
        return found


def joined(
    streams: Sequence[Sequence[Microbatch]],
    num_stages: int,
    cost: CostModel,
    *,
    memory_bytes: Sequence[int] | None = None,
    adapters: AdapterTimes | None = None,
) -> Program:
    """One program of several streams, each appended to the one before."""
    endless = EndlessProgram(num_stages, memory_bytes)
    parts = [*(endless.append(stream, cost, adapters) for stream in streams), endless.end()]
    stages = tuple(tuple(i for part in own for i in part) for own in zip(*parts, strict=True))
    return Program(tuple(microbatch for stream in streams for microbatch in stream), stages)
