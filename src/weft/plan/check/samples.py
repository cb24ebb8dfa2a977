"""What a program says about samples: which, how many in a microbatch, and in what order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from weft.plan.check.batches import CheckedBatch
from weft.plan.program import Measure, Program, Step
from weft.plan.types import JobQueue, Limits


def unknown_microbatches(program: Program) -> Iterator[str]:
    """Instructions for microbatches that are not there."""
    for stage, instructions in enumerate(program.stages):
        for place, i in enumerate(instructions):
            if isinstance(i, Measure | Step):
                continue
            if not 0 <= i.microbatch < len(program.microbatches):
                yield f"stage {stage}, instruction {place}: {i} names a microbatch that is not there"


def overfull(program: Program, limits: Limits | None) -> Iterator[str]:
    """Microbatches above the capacity, or without anything on a device that needs no no-ops."""
    if limits is None:
        return
    for place, microbatch in enumerate(program.microbatches):
        num_tokens = microbatch.num_tokens
        if num_tokens > limits.capacity or (not microbatch.segments and program.num_stages == 1):
            yield f"microbatch {place}: {num_tokens} tokens; capacity is {limits.capacity}"


def repeated(program: Program) -> Iterator[str]:
    """Samples that are in two places."""
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


def misplaced(program: Program, queues: Sequence[JobQueue]) -> Iterator[str]:
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
