"""Checks of a program's samples: which, how many in a microbatch, and in what order."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from weft.plan.program import Forward, Measure, Program, Step
from weft.plan.types import JobQueue, Limits


def unknown_microbatches(program: Program) -> Iterator[str]:
    for stage, instructions in enumerate(program.stages):
        for index, i in enumerate(instructions):
            if isinstance(i, Measure | Step):
                continue
            if not 0 <= i.microbatch < len(program.microbatches):
                yield f"stage {stage}, instruction {index}: {i} names a microbatch that is not there"


def overfull(program: Program, limits: Limits | None) -> Iterator[str]:
    """Microbatches above the capacity, or empty on a single device."""
    if limits is None:
        return
    for k, microbatch in enumerate(program.microbatches):
        num_tokens = microbatch.num_tokens
        if num_tokens > limits.capacity or (not microbatch.segments and program.num_stages == 1):
            yield f"microbatch {k}: {num_tokens} tokens; capacity is {limits.capacity}"


def repeated(program: Program) -> Iterator[str]:
    counts = Counter((s.job, s.step, s.index) for m in program.microbatches for s in m.segments)
    for (job, step, index), count in counts.items():
        if count > 1:
            yield f"sample {index} of step {step} of {job} is in {count} places"


def out_of_order(program: Program, queues: Sequence[JobQueue]) -> Iterator[str]:
    """Samples that are not the next one of their job, or of a free job's global batch."""
    waiting = {q.job: [(b.step, i, n) for b in q.batches for i, n in enumerate(b.lengths, b.first)] for q in queues}
    for samples in waiting.values():
        samples.reverse()
    left = {(q.job, b.step): dict(enumerate(b.lengths, b.first)) for q in queues if q.home is None for b in q.batches}
    free = {job for job, _ in left}
    newest: dict[str, int] = {}
    for k, microbatch in enumerate(program.microbatches):
        for segment in microbatch.segments:
            job, step = segment.job, segment.step
            if job in free:
                own = left.get((job, step), {})
                if own.pop(segment.index, None) != segment.length or newest.setdefault(job, step) > step:
                    yield f"microbatch {k}: {segment} is not a sample that {job} has left"
                newest[job] = step
                continue
            samples = waiting.get(job, [])
            if not samples or samples.pop() != (step, segment.index, segment.length):
                yield f"microbatch {k}: {segment} is not the next sample of {job}"
    yield from _skipped(program, left)


def _skipped(program: Program, left: Mapping[CheckedBatch, Mapping[int, int]]) -> Iterator[str]:
    """Global batches of free jobs that begin before all samples of the previous one have run."""
    last = {s.job: s.step for m in program.microbatches for s in m.segments}
    for (job, step), samples in left.items():
        if samples and step < last.get(job, step):
            yield f"step {step} of {job} has {len(samples)} samples that do not run, and step {last[job]} begins"


def mixed(program: Program, queues: Sequence[JobQueue]) -> Iterator[str]:
    """Samples of several lanes in one microbatch, and groups that are divided."""
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
    for k, microbatch in enumerate(program.microbatches):
        if len({lane_of.get(s.job) for s in microbatch.segments}) > 1:
            yield f"microbatch {k}: its jobs are of different lanes"
        held = Counter(group_of.get((s.job, s.step, s.index)) for s in microbatch.segments)
        for group, count in held.items():
            if group is not None and count != sizes[group]:
                yield f"microbatch {k}: {count} of {sizes[group]} samples that belong together"


CheckedBatch = tuple[str, int]


class CheckedBatches:
    def __init__(self, program: Program, queues: Sequence[JobQueue] | None) -> None:
        self.of: list[dict[CheckedBatch, int]] = [
            Counter((s.job, s.step) for s in m.segments) for m in program.microbatches
        ]
        """Global batches of each microbatch, with their numbers of samples in it."""
        self.replica_of = _replicas_of(program)
        counts = Counter((batch, self.replica_of[k]) for k, batches in enumerate(self.of) for batch in batches)
        self.num_backwards: dict[CheckedBatch, Counter[int]] = defaultdict(Counter)
        """Microbatches with samples of a global batch, by replica; 0 where its samples have run before."""
        for (batch, replica), count in counts.items():
            self.num_backwards[batch][replica] = count
        self.ended = set(self.num_backwards)
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
        everywhere = frozenset(range(len(program.replicas)))
        used: dict[str, set[int]] = defaultdict(set)
        for (job, _), replicas in self.num_backwards.items():
            used[job].update(replicas)
        self.steps_on: dict[str, frozenset[int]] = {}
        for job, known in used.items():
            if homes is None:
                self.steps_on[job] = everywhere if len(known) > 1 else frozenset(known)
            else:
                self.steps_on[job] = everywhere if (home := homes[job]) is None else frozenset({home})
        self.ordered = set() if homes is None else {job for job, home in homes.items() if home is not None}
        """Jobs whose samples go backward in order."""


def _replicas_of(program: Program) -> list[int]:
    found: dict[int, int] = {}
    for replica, stages in enumerate(program.replicas):
        for stage in stages:
            for i in program.stages[stage]:
                if isinstance(i, Forward):
                    found.setdefault(i.microbatch, replica)
    return [found.get(k, 0) for k in range(len(program.microbatches))]


def off_home_replica(program: Program, batches: CheckedBatches) -> Iterator[str]:
    """Microbatches with samples of jobs whose home is another replica."""
    for k, own in enumerate(batches.of):
        for job, _ in own:
            if batches.replica_of[k] not in batches.steps_on[job]:
                yield f"microbatch {k} is on replica {batches.replica_of[k]}, where {job} is not at home"
