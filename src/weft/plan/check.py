"""Validates any program, whoever made it; written without looking at any planner.

Checked on every stage: each microbatch forward and backward exactly once per slice, forward first; exactly the
transfers that the slices before and after need, in time; a global batch's step exactly once, after its last backward
and before the job's next forward; with several stages, its measure between the two; memory never above the limit.
Between stages: what a neighbour sends is received in the same order, and a run of all lists together comes to its end.

Against the queues it was made for: every sample is known and has its length, each job's samples come, and go backward,
in its own order with none skipped, no microbatch holds samples of two lanes or a part of a group, and none is above the
capacity. A global batch that the program leaves
unfinished has no step. Without queues every global batch counts as whole. O(segments + instructions).
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from weft.cost.types import CostModel
from weft.plan.program import Backward, Forward, Instruction, Measure, Program, Receive, Send, Step
from weft.plan.types import JobQueue, Limits

CheckedBatch = tuple[str, int]
"""Job and step."""
Transfer = tuple[int, int, bool]
"""What travels: microbatch, virtual stage it is for, whether it is a gradient."""


def violations(
    program: Program,
    queues: Sequence[JobQueue] | None = None,
    limits: Limits | None = None,
    *,
    cost: CostModel | None = None,
    memory_bytes: Sequence[int] | None = None,
) -> list[str]:
    """What is wrong with a program; empty if it may run.

    Samples and their order are checked where queues are given, capacity where limits are, memory where a cost model and
    each stage's bytes are.
    """
    found = [*_unknown(program), *_overfull(program, limits)]
    found += _repeated(program) if queues is None else [*_out_of_order(program, queues), *_misplaced(program, queues)]
    if found:
        return found
    batches = _Batches(program, queues)
    for stage in range(program.num_stages):
        found += _Walk(program, stage, batches, cost, None if memory_bytes is None else memory_bytes[stage]).problems()
    return found or [*_crossings(program), *_stuck(program)]


def _unknown(program: Program) -> Iterator[str]:
    """Microbatches and slices that are not there."""
    for stage, instructions in enumerate(program.stages):
        for place, i in enumerate(instructions):
            if isinstance(i, Measure | Step):
                continue
            if not 0 <= i.microbatch < len(program.microbatches) or not 0 <= i.chunk < program.num_chunks:
                yield f"stage {stage}, instruction {place}: {i} names a microbatch or slice that is not there"


def _overfull(program: Program, limits: Limits | None) -> Iterator[str]:
    """Microbatches above the capacity, or without anything on a device that needs no no-ops."""
    if limits is None:
        return
    for place, microbatch in enumerate(program.microbatches):
        num_tokens = microbatch.num_tokens
        if num_tokens > limits.capacity or (not microbatch.segments and program.num_stages == 1):
            yield f"microbatch {place}: {num_tokens} tokens; capacity is {limits.capacity}"


def _repeated(program: Program) -> Iterator[str]:
    """Samples that are in two places."""
    counts = Counter((s.job, s.step, s.index) for m in program.microbatches for s in m.segments)
    for (job, step, index), count in counts.items():
        if count > 1:
            yield f"sample {index} of step {step} of {job} is in {count} places"


def _out_of_order(program: Program, queues: Sequence[JobQueue]) -> Iterator[str]:
    """Samples that are not the next one of their job."""
    waiting = {q.job: [(b.step, i, n) for b in q.batches for i, n in enumerate(b.lengths, b.first)] for q in queues}
    for samples in waiting.values():
        samples.reverse()
    for place, microbatch in enumerate(program.microbatches):
        for segment in microbatch.segments:
            samples = waiting.get(segment.job, [])
            if not samples or samples.pop() != (segment.step, segment.index, segment.length):
                yield f"microbatch {place}: {segment} is not the next sample of {segment.job}"


def _misplaced(program: Program, queues: Sequence[JobQueue]) -> Iterator[str]:
    """Samples of several lanes in one microbatch, and groups that are not in one microbatch as a whole."""
    lane_of = {q.job: q.lane for q in queues}
    group_of: dict[tuple[str, int, int], int] = {}
    sizes: list[int] = []
    for queue in queues:
        for batch in queue.batches:
            index = batch.first
            for size in batch.groups:
                group_of |= {(queue.job, batch.step, index + i): len(sizes) for i in range(size)}
                sizes.append(size)
                index += size
    if not sizes and len(set(lane_of.values())) < 2:
        return
    for place, microbatch in enumerate(program.microbatches):
        if len({lane_of.get(s.job) for s in microbatch.segments}) > 1:
            yield f"microbatch {place}: its jobs are of different lanes"
        held = Counter(group_of.get((s.job, s.step, s.index)) for s in microbatch.segments)
        for group, count in held.items():
            if group is not None and count != sizes[group]:
                yield f"microbatch {place}: {count} of {sizes[group]} samples that belong together"


class _Batches:
    """The global batches of a program, which are the same on all stages."""

    def __init__(self, program: Program, queues: Sequence[JobQueue] | None) -> None:
        self.of: list[dict[CheckedBatch, int]] = [
            {(s.job, s.step): s.index for s in m.segments} for m in program.microbatches
        ]
        """Those of each microbatch, with the last sample that it holds."""
        self.num_backwards = Counter(batch for batches in self.of for batch in batches)
        """Microbatches that hold samples of a global batch; of one whose samples have all run before, none."""
        self.ended = set(self.num_backwards)
        """Those that step."""
        if queues is not None:
            last = {batch: index for batches in self.of for batch, index in batches.items()}
            ends = {(q.job, b.step): b.first + len(b.lengths) - 1 for q in queues for b in q.batches}
            due = {(q.job, q.batches[0].step): 0 for q in queues if q.batches and not q.batches[0].lengths}
            self.num_backwards.update(due)
            self.ended = {batch for batch, index in last.items() if ends[batch] == index} | due.keys()
        pairs = itertools.pairwise(sorted(self.num_backwards))
        self.previous = {batch: before for before, batch in pairs if before[0] == batch[0]}
        """The job's global batch before this one, if it has one here."""
        self.keeps_order = queues is not None


class _Walk:
    """One stage's list from its first instruction to its last."""

    def __init__(
        self, program: Program, stage: int, batches: _Batches, cost: CostModel | None, limit: int | None
    ) -> None:
        self.program, self.stage, self.batches, self.cost, self.limit = program, stage, batches, cost, limit
        self.left = {batch: count * program.num_chunks for batch, count in batches.num_backwards.items()}
        self.newest: dict[tuple[str, int], int] = {}
        """The last microbatch that has gone backward, of each job and slice."""
        self.place = 0
        self.done: set[Instruction] = set()
        self.stepped: set[CheckedBatch] = set()
        self.held = 0
        self.found: list[str] = []

    def problems(self) -> list[str]:
        for place, i in enumerate(self.program.stages[self.stage]):
            self.place = place
            if i in self.done:
                self._add("comes again")
                continue
            self.done.add(i)
            if isinstance(i, Measure):
                self._measure(i)
            elif isinstance(i, Step):
                self._step(i)
            elif isinstance(i, Forward):
                self._forward(i)
            elif isinstance(i, Backward):
                self._backward(i)
            elif isinstance(i, Send):
                source = (Backward if i.is_gradient else Forward)(i.microbatch, i.chunk)
                if self._next(i.chunk, i.is_gradient) != i.to_stage or source not in self.done:
                    self._add("has nothing to send there")
            elif self._next(i.chunk, not i.is_gradient) != i.from_stage:
                self._add("has nothing to wait for there")
        self._missing()
        return self.found

    def _add(self, text: str) -> None:
        instruction = self.program.stages[self.stage][self.place]
        self.found.append(f"stage {self.stage}, instruction {self.place}: {instruction} {text}")

    def _next(self, chunk: int, is_gradient: bool) -> int | None:
        """Stage of the slice that comes after this one, in the direction of activations or of gradients."""
        num_stages = self.program.num_stages
        virtual = chunk * num_stages + self.stage + (-1 if is_gradient else 1)
        if num_stages == 1 or not 0 <= virtual < num_stages * self.program.num_chunks:
            return None
        return virtual % num_stages

    def _forward(self, visit: Forward) -> None:
        k, chunk = visit.microbatch, visit.chunk
        self._input(k, chunk, is_gradient=False)
        # One stage holding several slices passes from slice to slice without a transfer.
        if self.program.num_stages == 1 and chunk > 0 and Forward(k, chunk - 1) not in self.done:
            self._add("comes before its input")
        for batch in self.batches.of[k]:
            before = self.batches.previous.get(batch)
            if before is not None and before not in self.stepped:
                self._add(f"comes before step {before[1]} of {before[0]}")
        self.held += self._held(k, chunk)
        if self.limit is not None and self.cost is not None and self.held > self.limit:
            self._add(f"brings the stage to {self.held:,} bytes; it has {self.limit:,}")

    def _backward(self, visit: Backward) -> None:
        k, chunk = visit.microbatch, visit.chunk
        self._input(k, chunk, is_gradient=True)
        is_last = self.program.num_stages > 1 or chunk + 1 == self.program.num_chunks
        if Forward(k, chunk) not in self.done or not (is_last or Backward(k, chunk + 1) in self.done):
            self._add("comes before what it goes back through")
        for job, step in self.batches.of[k]:
            self.left[job, step] -= 1
            newest = self.newest.get((job, chunk), -1)
            self.newest[job, chunk] = k
            if newest > k and self.batches.keeps_order:
                self._add(f"comes after microbatch {newest}, whose samples of {job} follow its own")
        self.held -= self._held(k, chunk)

    def _input(self, k: int, chunk: int, *, is_gradient: bool) -> None:
        source = self._next(chunk, not is_gradient)
        if source is not None and Receive(k, chunk, is_gradient, source) not in self.done:
            self._add("comes before its input is received")

    def _measure(self, measure: Measure) -> None:
        batch = (measure.job, measure.step)
        if self.program.num_stages == 1:
            self._add("is for several stages; one has the whole gradient")
        elif batch not in self.batches.ended:
            self._add("measures a global batch that is not there, or not whole")
        elif self.left[batch]:
            self._add(f"comes {self.left[batch]} backwards early")

    def _step(self, step: Step) -> None:
        batch = (step.job, step.step)
        self.stepped.add(batch)
        if batch not in self.batches.ended:
            self._add("steps a global batch that is not there, or not whole")
        elif self.left[batch]:
            self._add(f"comes {self.left[batch]} backwards early")
        elif self.program.num_stages > 1 and Measure(*batch) not in self.done:
            self._add("comes before its gradient is measured")

    def _missing(self) -> None:
        ended = sorted(self.batches.ended)
        expected: list[Instruction] = [Step(job, step) for job, step in ended]
        expected += [Measure(job, step) for job, step in ended] if self.program.num_stages > 1 else []
        for k in range(len(self.program.microbatches)):
            for chunk in range(self.program.num_chunks):
                expected += [Forward(k, chunk), Backward(k, chunk)]
                onward, back = self._next(chunk, False), self._next(chunk, True)
                expected += [] if onward is None else [Send(k, chunk, False, onward), Receive(k, chunk, True, onward)]
                expected += [] if back is None else [Receive(k, chunk, False, back), Send(k, chunk, True, back)]
        self.found.extend(f"stage {self.stage}: {i} is missing" for i in expected if i not in self.done)

    def _held(self, k: int, chunk: int) -> int:
        if self.cost is None:
            return 0
        lengths = [s.length for s in self.program.microbatches[k].segments]
        if not lengths:
            return 0
        return self.cost.held_bytes(lengths, chunk * self.program.num_stages + self.stage)


def _crossings(program: Program) -> Iterator[str]:
    """Neighbours that would take each other's transfers for one another: channels deliver in order."""
    sent: dict[tuple[int, int, bool], list[Transfer]] = defaultdict(list)
    awaited: dict[tuple[int, int, bool], list[Transfer]] = defaultdict(list)
    for stage, instructions in enumerate(program.stages):
        for i in instructions:
            if isinstance(i, Send):
                sent[stage, i.to_stage, i.is_gradient].append(_parcel(program, stage, i))
            elif isinstance(i, Receive):
                awaited[i.from_stage, stage, i.is_gradient].append(_parcel(program, stage, i))
    for source, target, is_gradient in sorted({*sent, *awaited}):
        channel = (source, target, is_gradient)
        if sent[channel] != awaited[channel]:
            kind = "gradients" if is_gradient else "activations"
            yield f"stage {target} receives {kind} in another order than stage {source} sends them"


def _stuck(program: Program) -> Iterator[str]:
    """Stages that wait for each other for ever when all lists run side by side."""
    places = [0] * program.num_stages
    arrived: set[Transfer] = set()
    measured: Counter[Measure] = Counter()
    moved = True
    while moved:
        moved = False
        for stage, instructions in enumerate(program.stages):
            while places[stage] < len(instructions):
                i = instructions[places[stage]]
                if isinstance(i, Receive) and _parcel(program, stage, i) not in arrived:
                    break
                if isinstance(i, Measure) and stage == 0 and measured[i] < program.num_stages - 1:
                    break
                if isinstance(i, Step) and stage > 0 and measured[Measure(i.job, i.step)] < program.num_stages:
                    break
                if isinstance(i, Send):
                    arrived.add(_parcel(program, stage, i))
                measured.update([i] if isinstance(i, Measure) else [])
                places[stage] += 1
                moved = True
    for stage, instructions in enumerate(program.stages):
        if places[stage] < len(instructions):
            yield f"stage {stage} waits for ever at {instructions[places[stage]]}"


def _parcel(program: Program, stage: int, i: Send | Receive) -> Transfer:
    virtual = i.chunk * program.num_stages + stage
    if isinstance(i, Send):
        virtual += -1 if i.is_gradient else 1
    return i.microbatch, virtual, i.is_gradient
