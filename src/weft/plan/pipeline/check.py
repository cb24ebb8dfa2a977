"""Validates any pipeline's program, whoever made it; written without looking at any builder.

Checked on every stage: each microbatch forward and backward exactly once per slice, forward first; exactly the
transfers that the slices before and after need, in time; a global batch's step exactly once, after its last backward
and before the job's next forward; memory never above the limit. Between stages: what a neighbour sends is received in
the same order, and a run of all lists together comes to its end. O(instructions).
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from weft.cost.types import CostModel
from weft.plan.stages import Backward, Forward, Receive, Send, StagedProgram, StageInstruction, StageStep

Parcel = tuple[int, int, bool]
"""What travels: microbatch, virtual stage it is for, whether it is a gradient."""


def problems(
    program: StagedProgram, *, cost: CostModel | None = None, memory_bytes: Sequence[int] | None = None
) -> list[str]:
    """What is wrong with a program; empty if it may run. Memory is checked where a cost model and limits are given."""
    found = list(_unknown(program)) or [*_samples(program)]
    if found:
        return found
    for stage in range(program.num_stages):
        found += _Walk(program, stage, cost, None if memory_bytes is None else memory_bytes[stage]).problems()
    return found or [*_crossings(program), *_stuck(program)]


def _unknown(program: StagedProgram) -> Iterator[str]:
    """Microbatches and slices that are not there."""
    for stage, instructions in enumerate(program.stages):
        for place, i in enumerate(instructions):
            if isinstance(i, StageStep):
                continue
            if not 0 <= i.microbatch < len(program.microbatches) or not 0 <= i.chunk < program.num_chunks:
                yield f"stage {stage}, instruction {place}: {i} names a microbatch or slice that is not there"


def _samples(program: StagedProgram) -> Iterator[str]:
    """Samples that are in two places."""
    counts = Counter((s.job, s.step, s.index) for m in program.microbatches for s in m.segments)
    for (job, step, index), count in counts.items():
        if count > 1:
            yield f"sample {index} of step {step} of {job} is in {count} places"


class _Walk:
    """One stage's list from its first instruction to its last."""

    def __init__(self, program: StagedProgram, stage: int, cost: CostModel | None, limit: int | None) -> None:
        self.program, self.stage, self.cost, self.limit = program, stage, cost, limit
        self.batches = [{(s.job, s.step) for s in m.segments} for m in program.microbatches]
        self.left = Counter(batch for batches in self.batches for batch in batches for _ in range(program.num_chunks))
        self.previous = {
            (job, step): before
            for (other, before), (job, step) in itertools.pairwise(sorted(self.left))
            if other == job
        }
        """The job's global batch before this one, if it has one here."""
        self.done: Counter[StageInstruction] = Counter()
        self.held = 0
        self.found: list[str] = []

    def problems(self) -> list[str]:
        for place, i in enumerate(self.program.stages[self.stage]):
            self.where = f"stage {self.stage}, instruction {place}: {i}"
            self.done[i] += 1
            if self.done[i] > 1:
                self._add("comes again")
            elif isinstance(i, StageStep):
                self._step(i)
            elif isinstance(i, Forward | Backward):
                self._compute(i)
            elif isinstance(i, Send):
                source = (Backward if i.is_gradient else Forward)(i.microbatch, i.chunk)
                if self._next(i.chunk, i.is_gradient) != i.to_stage or not self.done[source]:
                    self._add("has nothing to send there")
            elif self._next(i.chunk, not i.is_gradient) != i.from_stage:
                self._add("has nothing to wait for there")
        self._missing()
        return self.found

    def _add(self, text: str) -> None:
        self.found.append(f"{self.where} {text}")

    def _next(self, chunk: int, is_gradient: bool) -> int | None:
        """Stage of the slice that comes after this one, in the direction of activations or of gradients."""
        num_stages = self.program.num_stages
        virtual = chunk * num_stages + self.stage + (-1 if is_gradient else 1)
        if num_stages == 1 or not 0 <= virtual < num_stages * self.program.num_chunks:
            return None
        return virtual % num_stages

    def _compute(self, visit: Forward | Backward) -> None:
        k, chunk = visit.microbatch, visit.chunk
        is_backward = isinstance(visit, Backward)
        source = self._next(chunk, not is_backward)
        if source is not None and not self.done[Receive(k, chunk, is_backward, source)]:
            self._add("comes before its input is received")
        num_chunks = self.program.num_chunks
        size = self._held(k, chunk)
        if is_backward:
            # One stage holding several slices passes from slice to slice without a transfer.
            if not self.done[Forward(k, chunk)] or (
                self.program.num_stages == 1 and chunk + 1 < num_chunks and not self.done[Backward(k, chunk + 1)]
            ):
                self._add("comes before what it goes back through")
            self.left.subtract(self.batches[k])
            self.held -= size
            return
        if self.program.num_stages == 1 and chunk > 0 and not self.done[Forward(k, chunk - 1)]:
            self._add("comes before its input")
        for job, step in sorted(self.batches[k]):
            before = self.previous.get((job, step))
            if before is not None and not self.done[StageStep(job, before)]:
                self._add(f"comes before step {before} of {job}")
        self.held += size
        if self.limit is not None and self.cost is not None and self.held > self.limit:
            self._add(f"brings the stage to {self.held:,} bytes; it has {self.limit:,}")

    def _step(self, step: StageStep) -> None:
        left = self.left.get((step.job, step.step))
        if left is None:
            self._add("steps a global batch that is not there")
        elif left:
            self._add(f"comes {left} backwards early")

    def _missing(self) -> None:
        self.where = f"stage {self.stage}:"
        expected: list[StageInstruction] = [StageStep(job, step) for job, step in sorted(self.left)]
        for k in range(len(self.program.microbatches)):
            for chunk in range(self.program.num_chunks):
                expected += [Forward(k, chunk), Backward(k, chunk)]
                onward, back = self._next(chunk, False), self._next(chunk, True)
                expected += [] if onward is None else [Send(k, chunk, False, onward), Receive(k, chunk, True, onward)]
                expected += [] if back is None else [Receive(k, chunk, False, back), Send(k, chunk, True, back)]
        self.found.extend(f"stage {self.stage}: {i} is missing" for i in expected if not self.done[i])

    def _held(self, k: int, chunk: int) -> int:
        lengths = [s.length for s in self.program.microbatches[k].segments]
        if self.cost is None or not lengths:
            return 0
        return self.cost.held_bytes(lengths, chunk * self.program.num_stages + self.stage)


def _crossings(program: StagedProgram) -> Iterator[str]:
    """Neighbours that would take each other's transfers for one another: channels deliver in order."""
    sent: dict[tuple[int, int, bool], list[Parcel]] = defaultdict(list)
    awaited: dict[tuple[int, int, bool], list[Parcel]] = defaultdict(list)
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


def _stuck(program: StagedProgram) -> Iterator[str]:
    """Stages that wait for each other for ever when all lists run side by side."""
    places = [0] * program.num_stages
    arrived: set[Parcel] = set()
    moved = True
    while moved:
        moved = False
        for stage, instructions in enumerate(program.stages):
            while places[stage] < len(instructions):
                i = instructions[places[stage]]
                if isinstance(i, Receive) and _parcel(program, stage, i) not in arrived:
                    break
                if isinstance(i, Send):
                    arrived.add(_parcel(program, stage, i))
                places[stage] += 1
                moved = True
    for stage, instructions in enumerate(program.stages):
        if places[stage] < len(instructions):
            yield f"stage {stage} waits for ever at {instructions[places[stage]]}"


def _parcel(program: StagedProgram, stage: int, i: Send | Receive) -> Parcel:
    virtual = i.chunk * program.num_stages + stage
    if isinstance(i, Send):
        virtual += -1 if i.is_gradient else 1
    return i.microbatch, virtual, i.is_gradient
