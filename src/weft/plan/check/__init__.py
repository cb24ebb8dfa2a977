"""Checks any program independently of its planner.

On every stage: each microbatch forward and backward exactly once, forward first; exactly the transfers that the stages
before and after need, in time; a global batch's step exactly once, after its last backward and before the job's next
forward; with several stages, its measure between the two; memory never above the limit.

Between stages: transfers are received in the order in which they are sent, and all lists together run to their end;
stages in step run their passes together, in the same directions.

Of a pair: two microbatches without a common job, whose forwards, and whose backwards, are adjacent.

With several replicas: all of a microbatch is on one of them. Every replica with samples of a global batch measures it.
A job at home on a replica has all its samples there and steps there; one with order-independent sums steps everywhere.

Against the queues it was made for: every sample is known and has its length, each job's samples come, and go backward,
in order without gaps, no microbatch holds samples of two lanes or a part of a group, and none is above the capacity.
Where sums do not depend on the order, the samples of a global batch may be in any order, each once. An unfinished
global batch has no step. Without queues every global batch counts as whole, and one with samples on several replicas as
order-independent. O(segments + instructions).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from weft.plan.check.samples import (
    CheckedBatch,
    CheckedBatches,
    mixed,
    off_home_replica,
    out_of_order,
    overfull,
    repeated,
    unknown_microbatches,
)
from weft.plan.cost.types import CostModel, LinearCost
from weft.plan.layout import copies
from weft.plan.program import Backward, Forward, Instruction, Measure, Program, Receive, Send, Step
from weft.plan.types import JobQueue, Limits


def violations(
    program: Program,
    queues: Sequence[JobQueue] | None = None,
    limits: Limits | None = None,
    *,
    cost: CostModel | None = None,
    memory_bytes: Sequence[int] | None = None,
) -> list[str]:
    """The faults of a program; empty if it may run. Samples and their order are checked where queues are given,
    capacity and microbatches in flight where limits are, memory where a cost model and each stage's bytes are."""
    if program.replica_sizes and (sum(program.replica_sizes) != program.num_stages or min(program.replica_sizes) < 1):
        return [f"replicas of {program.replica_sizes} stages are not the {program.num_stages} that are there"]
    if program.shards and not _can_share(program):
        return [f"shards of {program.shards} replicas are not those of {program.replica_sizes} stages that are there"]
    found = [*unknown_microbatches(program), *overfull(program, limits), *not_side_by_side(program)]
    found += repeated(program) if queues is None else [*out_of_order(program, queues), *mixed(program, queues)]
    if found:
        return found
    batches = CheckedBatches(program, queues)
    found += off_home_replica(program, batches)
    if limits is not None and limits.in_flight:
        full = max(map(limits.rows, (limits.capacity, *(m.num_tokens for m in program.microbatches))))
        cost, memory_bytes = _Rows(limits=limits), [number * full for number in limits.in_flight]
    for stage in range(program.num_stages):
        limit = None if memory_bytes is None else memory_bytes[stage]
        found += StageWalk(program, stage, batches, cost, limit).problems()
    return found or [*crossings(program), *stuck(program)]


def _can_share(program: Program) -> bool:
    """True if every replica has one copy of the frozen weights, alone or with others of as many stages."""
    sizes, shards = program.replica_sizes, program.shards
    if min(shards) < 1 or sum(shards) != len(sizes):
        return False
    return all(len({sizes[replica] for replica in own}) == 1 for own in copies(len(sizes), shards))


@dataclass(frozen=True)
class _Rows(LinearCost):
    """Memory model that counts rows instead of bytes."""

    limits: Limits = field(kw_only=True)

    def held_bytes(self, lengths: Sequence[int], stage: int) -> int:
        return self.limits.rows(sum(lengths))


class StageWalk:
    def __init__(
        self, program: Program, stage: int, batches: CheckedBatches, cost: CostModel | None, limit: int | None
    ) -> None:
        self.program, self.stage, self.batches, self.cost, self.limit = program, stage, batches, cost, limit
        self.replica = next(k for k, own in enumerate(program.replicas) if stage in own)
        self.own = program.replicas[self.replica]
        self.left = {batch: count[self.replica] for batch, count in batches.num_backwards.items()}
        self.measures = {batch for batch, count in batches.num_backwards.items() if self.replica in count}
        self.newest: dict[str, int] = {}
        """Last microbatch of each job whose backward has run."""
        self.index = 0
        self.done: set[Instruction] = set()
        self.stepped: set[CheckedBatch] = set()
        self.held = 0
        self.found: list[str] = []

    def problems(self) -> list[str]:
        for index, i in enumerate(self.program.stages[self.stage]):
            self.index = index
            if i in self.done:
                self._add("comes again")
                continue
            self.done.add(i)
            if not isinstance(i, Measure | Step) and self.batches.replica_of[i.microbatch] != self.replica:
                self._add("is of a microbatch that another replica runs")
            elif isinstance(i, Measure):
                self._measure(i)
            elif isinstance(i, Step):
                self._step(i)
            elif isinstance(i, Forward):
                self._forward(i)
            elif isinstance(i, Backward):
                self._backward(i)
            elif isinstance(i, Send):
                source = (Backward if i.is_gradient else Forward)(i.microbatch)
                if self._next(i.is_gradient) != i.to_stage or source not in self.done:
                    self._add("has nothing to send there")
            elif self._next(not i.is_gradient) != i.from_stage:
                self._add("has nothing to wait for there")
        self._missing()
        return self.found

    def _add(self, text: str) -> None:
        instruction = self.program.stages[self.stage][self.index]
        self.found.append(f"stage {self.stage}, instruction {self.index}: {instruction} {text}")

    def _next(self, is_gradient: bool) -> int | None:
        """The neighbour in the direction of activations or of gradients, within the replica."""
        neighbour = self.stage + (-1 if is_gradient else 1)
        return neighbour if neighbour in self.own else None

    def _forward(self, visit: Forward) -> None:
        k = visit.microbatch
        self._input(k, is_gradient=False)
        for batch in self.batches.of[k]:
            before = self.batches.previous.get(batch)
            if before is not None and before not in self.stepped:
                self._add(f"comes before step {before[1]} of {before[0]}")
        self.held += self._held(k)
        if self.limit is not None and self.cost is not None and self.held > self.limit:
            unit = "rows" if isinstance(self.cost, _Rows) else "bytes"
            self._add(f"brings the stage to {self.held:,} {unit}; it has {self.limit:,}")

    def _backward(self, visit: Backward) -> None:
        k = visit.microbatch
        self._input(k, is_gradient=True)
        if Forward(k) not in self.done:
            self._add("comes before what it goes back through")
        for job, step in self.batches.of[k]:
            self.left[job, step] -= 1
            newest = self.newest.get(job, -1)
            self.newest[job] = k
            if newest > k and job in self.batches.ordered:
                self._add(f"comes after microbatch {newest}, whose samples of {job} follow its own")
        self.held -= self._held(k)

    def _input(self, k: int, *, is_gradient: bool) -> None:
        source = self._next(not is_gradient)
        if source is not None and Receive(k, is_gradient, source) not in self.done:
            self._add("comes before its input is received")

    def _measure(self, measure: Measure) -> None:
        batch = (measure.job, measure.step)
        if self.program.num_stages == 1:
            self._add("is for several stages; one has the whole gradient")
        elif batch not in self.batches.ended:
            self._add("measures a global batch that is not there, or not whole")
        elif batch not in self.measures:
            self._add("measures a global batch of which the replica has no sample")
        elif self.left[batch]:
            self._add(f"comes {self.left[batch]} backwards early")

    def _step(self, step: Step) -> None:
        batch = (step.job, step.step)
        self.stepped.add(batch)
        if batch not in self.batches.ended:
            self._add("steps a global batch that is not there, or not whole")
        elif self.replica not in self.batches.steps_on[step.job]:
            self._add("steps a job that is not at home here")
        elif self.left[batch]:
            self._add(f"comes {self.left[batch]} backwards early")
        elif self.program.num_stages > 1 and batch in self.measures and Measure(*batch) not in self.done:
            self._add("comes before its gradient is measured")

    def _missing(self) -> None:
        ended = sorted(self.batches.ended)
        steps_on = self.batches.steps_on
        expected: list[Instruction] = [Step(job, step) for job, step in ended if self.replica in steps_on[job]]
        if self.program.num_stages > 1:
            expected += [Measure(job, step) for job, step in ended if (job, step) in self.measures]
        onward, back = self._next(False), self._next(True)
        for k in range(len(self.program.microbatches)):
            if self.batches.replica_of[k] != self.replica:
                continue
            expected += [Forward(k), Backward(k)]
            expected += [] if onward is None else [Send(k, False, onward), Receive(k, True, onward)]
            expected += [] if back is None else [Receive(k, False, back), Send(k, True, back)]
        self.found.extend(f"stage {self.stage}: {i} is missing" for i in expected if i not in self.done)

    def _held(self, k: int) -> int:
        if self.cost is None:
            return 0
        lengths = [s.length for s in self.program.microbatches[k].segments]
        if not lengths:
            return 0
        return self.cost.held_bytes(lengths, self.stage - self.own.start)


Transfer = tuple[int, int, bool]
"""Microbatch, target stage, and whether it is a gradient."""


def crossings(program: Program) -> Iterator[str]:
    """Neighbours with different orders of transfers: channels deliver in order."""
    sent: dict[tuple[int, int, bool], list[int]] = defaultdict(list)
    awaited: dict[tuple[int, int, bool], list[int]] = defaultdict(list)
    for stage, instructions in enumerate(program.stages):
        for i in instructions:
            if isinstance(i, Send):
                sent[stage, i.to_stage, i.is_gradient].append(i.microbatch)
            elif isinstance(i, Receive):
                awaited[i.from_stage, stage, i.is_gradient].append(i.microbatch)
    for source, target, is_gradient in sorted({*sent, *awaited}):
        channel = (source, target, is_gradient)
        if sent[channel] != awaited[channel]:
            kind = "gradients" if is_gradient else "activations"
            yield f"stage {target} receives {kind} in another order than stage {source} sends them"


def stuck(program: Program) -> Iterator[str]:
    """Stages that wait for each other for ever when all lists run side by side."""
    positions = [0] * program.num_stages
    arrived: set[Transfer] = set()
    measured: Counter[Measure] = Counter()
    measuring, rings = program.measuring, program.rings
    in_step = {stage for ring in rings for stage in ring}
    moved = True
    while moved:
        moved = False
        for stage, instructions in enumerate(program.stages):
            while positions[stage] < len(instructions):
                i = instructions[positions[stage]]
                if isinstance(i, Receive) and (i.microbatch, stage, i.is_gradient) not in arrived:
                    break
                if isinstance(i, Forward | Backward) and stage in in_step:
                    break
                if isinstance(i, Measure) and stage == measuring[i][0] and measured[i] < len(measuring[i]) - 1:
                    break
                if isinstance(i, Step) and measured[of := Measure(i.job, i.step)] < len(measuring.get(of, ())):
                    break
                if isinstance(i, Send):
                    arrived.add((i.microbatch, i.to_stage, i.is_gradient))
                measured.update([i] if isinstance(i, Measure) else [])
                positions[stage] += 1
                moved = True
        for ring in rings:
            if _may_pass(program, ring, positions):
                for stage in ring:
                    positions[stage] += 1
                moved = True
    for stage, instructions in enumerate(program.stages):
        if positions[stage] < len(instructions):
            yield f"stage {stage} waits for ever at {instructions[positions[stage]]}"


def _may_pass(program: Program, ring: Sequence[int], positions: Sequence[int]) -> bool:
    """True if all of these stages are before a pass in the same direction."""
    at = set[type | None]()
    for stage in ring:
        own, position = program.stages[stage], positions[stage]
        at.add(type(own[position]) if position < len(own) else None)
    return at in ({Forward}, {Backward})


def not_side_by_side(program: Program) -> Iterator[str]:
    """Pairs that share a job, or between which a stage does something else."""
    count = len(program.microbatches)
    for k, times in sorted(Counter(k for pair in program.pairs for k in pair).items()):
        if times > 1 or not 0 <= k < count:
            yield f"microbatch {k} is in {times} pairs, and {count} microbatches are there"
            return
    for first, second in program.pairs:
        if first > second:
            yield f"microbatches {first} and {second} are a pair in which the later one comes first"
        jobs = [program.microbatches[k].job_tokens.keys() for k in (first, second)]
        if not all(jobs):
            yield f"microbatches {first} and {second} are a pair, and one of them is empty"
        for job in sorted(jobs[0] & jobs[1]):
            yield f"microbatches {first} and {second} are a pair, and {job} has samples in both"
    beside = dict(program.pairs)
    seconds = {second: first for first, second in program.pairs}
    for stage, instructions in enumerate(program.stages):
        for index, i in enumerate(instructions):
            if not isinstance(i, Forward | Backward):
                continue
            if i.microbatch in beside:
                wanted, neighbour = type(i)(beside[i.microbatch]), instructions[index + 1 : index + 2]
            elif i.microbatch in seconds:
                wanted, neighbour = type(i)(seconds[i.microbatch]), instructions[max(index - 1, 0) : index]
            else:
                continue
            if neighbour != (wanted,):
                yield f"stage {stage}, instruction {index}: {i} does not stand beside {wanted}, with which it is a pair"
