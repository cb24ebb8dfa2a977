"""Validates any program, whoever made it; written without looking at any planner.

Checked on every stage: each microbatch forward and backward exactly once per slice, forward first; exactly the
transfers that the slices before and after need, in time; a global batch's step exactly once, after its last backward
and before the job's next forward; with several stages, its measure between the two; memory never above the limit.
Between stages: what a neighbour sends is received in the same order, and a run of all lists together comes to its end;
where they are in step, all of them run a microbatch, or none does.
With several replicas, all of a microbatch is on one of them. Whoever had samples of a global batch measures it. A job
at home on a replica has all its samples there and steps there; one whose sums are free steps on every replica.

Against the queues it was made for: every sample is known and has its length, each job's samples come, and go backward,
in its own order with none skipped, no microbatch holds samples of two lanes or a part of a group, and none is above the
capacity. Where sums are free, the samples of a global batch may be in any order, each once. A global batch that the
program leaves unfinished has no step. Without queues every global batch counts as whole, and what has samples on
several replicas counts as free. O(segments + instructions).
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

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
    if program.replica_sizes and (sum(program.replica_sizes) != program.num_stages or min(program.replica_sizes) < 1):
        return [f"replicas of {program.replica_sizes} stages are not the {program.num_stages} that are there"]
    found = [*_unknown(program), *_overfull(program, limits)]
    found += _repeated(program) if queues is None else [*_out_of_order(program, queues), *_misplaced(program, queues)]
    if found:
        return found
    batches = _Batches(program, queues)
    found += _away(program, batches)
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
    """Samples that are not the next one of their job, or of a free job's global batch."""
    waiting = {q.job: [(b.step, i, n) for b in q.batches for i, n in enumerate(b.lengths, b.first)] for q in queues}
    for samples in waiting.values():
        samples.reverse()
    left = {(q.job, b.step): dict(enumerate(b.lengths, b.first)) for q in queues if q.home is None for b in q.batches}
    free = {job for job, _ in left}
    newest: dict[str, int] = {}
    for place, microbatch in enumerate(program.microbatches):
        for segment in microbatch.segments:
            job, step = segment.job, segment.step
            if job in free:
                own = left.get((job, step), {})
                if own.pop(segment.index, None) != segment.length or newest.setdefault(job, step) > step:
                    yield f"microbatch {place}: {segment} is not a sample that {job} has left"
                newest[job] = step
                continue
            samples = waiting.get(job, [])
            if not samples or samples.pop() != (step, segment.index, segment.length):
                yield f"microbatch {place}: {segment} is not the next sample of {job}"
    yield from _skipped(program, left)


def _skipped(program: Program, left: Mapping[CheckedBatch, Mapping[int, int]]) -> Iterator[str]:
    """Global batches of free jobs that are begun before all samples of the one before have run."""
    last = {s.job: s.step for m in program.microbatches for s in m.segments}
    for (job, step), samples in left.items():
        if samples and step < last.get(job, step):
            yield f"step {step} of {job} has {len(samples)} samples that do not run, and step {last[job]} begins"


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
            Counter((s.job, s.step) for s in m.segments) for m in program.microbatches
        ]
        """Those of each microbatch, with the number of samples that it holds."""
        self.replica_of = _replicas_of(program)
        counts = Counter((batch, self.replica_of[k]) for k, batches in enumerate(self.of) for batch in batches)
        self.num_backwards: dict[CheckedBatch, Counter[int]] = defaultdict(Counter)
        """Microbatches that hold samples of a global batch, by replica; of one whose samples have run before, none."""
        for (batch, replica), count in counts.items():
            self.num_backwards[batch][replica] = count
        self.ended = set(self.num_backwards)
        """Those that step."""
        homes = None if queues is None else {q.job: q.home for q in queues}
        if queues is not None:
            done = Counter[CheckedBatch]()
            for batches in self.of:
                done.update(batches)
            whole = {(q.job, b.step): len(b.lengths) for q in queues for b in q.batches}
            due = {(q.job, q.batches[0].step) for q in queues if q.batches and not q.batches[0].lengths}
            for job, step in due:
                home = 0 if homes is None else homes[job]
                self.num_backwards[job, step][home or 0] = 0
            self.ended = {batch for batch, count in done.items() if whole[batch] == count} | due
        pairs = itertools.pairwise(sorted(self.num_backwards))
        self.previous = {batch: before for before, batch in pairs if before[0] == batch[0]}
        """The job's global batch before this one, if it has one here."""
        everywhere = frozenset(range(len(program.replicas)))
        used: dict[str, set[int]] = defaultdict(set)
        for (job, _), replicas in self.num_backwards.items():
            used[job].update(replicas)
        self.steps_on: dict[str, frozenset[int]] = {}
        """The replicas on which each job steps."""
        for job, known in used.items():
            if homes is None:
                self.steps_on[job] = everywhere if len(known) > 1 else frozenset(known)
            else:
                self.steps_on[job] = everywhere if (home := homes[job]) is None else frozenset({home})
        self.ordered = set() if homes is None else {job for job, home in homes.items() if home is not None}
        """Jobs whose samples go backward in their order."""


def _replicas_of(program: Program) -> list[int]:
    """The replica that runs each microbatch: the first with a stage that has it forward."""
    found: dict[int, int] = {}
    for replica, stages in enumerate(program.replicas):
        for stage in stages:
            for i in program.stages[stage]:
                if isinstance(i, Forward):
                    found.setdefault(i.microbatch, replica)
    return [found.get(k, 0) for k in range(len(program.microbatches))]


def _away(program: Program, batches: _Batches) -> Iterator[str]:
    """Microbatches with samples of jobs that are at home on another replica."""
    for k, own in enumerate(batches.of):
        for job, _ in own:
            if batches.replica_of[k] not in batches.steps_on[job]:
                yield f"microbatch {k} is on replica {batches.replica_of[k]}, where {job} is not at home"


class _Walk:
    """One stage's list from its first instruction to its last."""

    def __init__(
        self, program: Program, stage: int, batches: _Batches, cost: CostModel | None, limit: int | None
    ) -> None:
        self.program, self.stage, self.batches, self.cost, self.limit = program, stage, batches, cost, limit
        self.replica = next(place for place, own in enumerate(program.replicas) if stage in own)
        own = program.replicas[self.replica]
        self.first, self.num_stages = own.start, len(own)
        counts = {batch: count[self.replica] for batch, count in batches.num_backwards.items()}
        self.left = {batch: count * program.num_chunks for batch, count in counts.items()}
        self.measures = {batch for batch, count in batches.num_backwards.items() if self.replica in count}
        """Global batches of which the replica has a part."""
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
        virtual = chunk * self.num_stages + self.stage - self.first + (-1 if is_gradient else 1)
        if self.num_stages == 1 or not 0 <= virtual < self.num_stages * self.program.num_chunks:
            return None
        return self.first + virtual % self.num_stages

    def _forward(self, visit: Forward) -> None:
        k, chunk = visit.microbatch, visit.chunk
        self._input(k, chunk, is_gradient=False)
        # One stage holding several slices passes from slice to slice without a transfer.
        if self.num_stages == 1 and chunk > 0 and Forward(k, chunk - 1) not in self.done:
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
        is_last = self.num_stages > 1 or chunk + 1 == self.program.num_chunks
        if Forward(k, chunk) not in self.done or not (is_last or Backward(k, chunk + 1) in self.done):
            self._add("comes before what it goes back through")
        for job, step in self.batches.of[k]:
            self.left[job, step] -= 1
            newest = self.newest.get((job, chunk), -1)
            self.newest[job, chunk] = k
            if newest > k and job in self.batches.ordered:
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
        for k in range(len(self.program.microbatches)):
            if self.batches.replica_of[k] != self.replica:
                continue
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
        return self.cost.held_bytes(lengths, chunk * self.num_stages + self.stage - self.first)


def _crossings(program: Program) -> Iterator[str]:
    """Neighbours that would take each other's transfers for one another: channels deliver in order."""
    owners = [own for own in program.replicas for _ in own]
    sent: dict[tuple[int, int, bool], list[Transfer]] = defaultdict(list)
    awaited: dict[tuple[int, int, bool], list[Transfer]] = defaultdict(list)
    for stage, instructions in enumerate(program.stages):
        for i in instructions:
            if isinstance(i, Send):
                sent[stage, i.to_stage, i.is_gradient].append(_parcel(owners, stage, i))
            elif isinstance(i, Receive):
                awaited[i.from_stage, stage, i.is_gradient].append(_parcel(owners, stage, i))
    for source, target, is_gradient in sorted({*sent, *awaited}):
        channel = (source, target, is_gradient)
        if sent[channel] != awaited[channel]:
            kind = "gradients" if is_gradient else "activations"
            yield f"stage {target} receives {kind} in another order than stage {source} sends them"


def _stuck(program: Program) -> Iterator[str]:
    """Stages that wait for each other for ever when all lists run side by side."""
    owners = [own for own in program.replicas for _ in own]
    places = [0] * program.num_stages
    arrived: set[Transfer] = set()
    measured: Counter[Measure] = Counter()
    measuring = program.measuring
    moved = True
    while moved:
        moved = False
        for stage, instructions in enumerate(program.stages):
            while places[stage] < len(instructions):
                i = instructions[places[stage]]
                if isinstance(i, Receive) and _parcel(owners, stage, i) not in arrived:
                    break
                if isinstance(i, Forward) and program.is_in_step:
                    break
                if isinstance(i, Measure) and stage == measuring[i][0] and measured[i] < len(measuring[i]) - 1:
                    break
                if isinstance(i, Step) and measured[of := Measure(i.job, i.step)] < len(measuring.get(of, ())):
                    break
                if isinstance(i, Send):
                    arrived.add(_parcel(owners, stage, i))
                measured.update([i] if isinstance(i, Measure) else [])
                places[stage] += 1
                moved = True
        if program.is_in_step and not moved and _all_forward(program, places):
            places = [place + 1 for place in places]
            moved = True
    for stage, instructions in enumerate(program.stages):
        if places[stage] < len(instructions):
            yield f"stage {stage} waits for ever at {instructions[places[stage]]}"


def _all_forward(program: Program, places: Sequence[int]) -> bool:
    """Whether every stage stands before a microbatch."""
    at = zip(program.stages, places, strict=True)
    return all(place < len(own) and isinstance(own[place], Forward) for own, place in at)


def _parcel(owners: Sequence[range], stage: int, i: Send | Receive) -> Transfer:
    own = owners[stage]
    virtual = i.chunk * len(own) + stage - own.start
    if isinstance(i, Send):
        virtual += -1 if i.is_gradient else 1
    return i.microbatch, virtual, i.is_gradient
