"""Validates any program, whoever made it; written without looking at any planner."""

from __future__ import annotations

from collections.abc import Sequence

from weft.plan.types import ForwardBackward, JobQueue, Limits, Program, Step


def violations(program: Program, queues: Sequence[JobQueue], limits: Limits) -> list[str]:
    """What is wrong with a program for these queues; empty if it may run.

    Checked: capacity; every sample is known, has its length and comes in its job's order, none skipped; a job's step
    comes after its last sample of that global batch and before the first of the next; none is missing before the end.
    """
    problems: list[str] = []
    expected = {q.job: [(b.step, b.first + i, n) for b in q.batches for i, n in enumerate(b.lengths)] for q in queues}
    last_index = {(q.job, b.step): b.first + len(b.lengths) - 1 for q in queues for b in q.batches}
    seen = dict.fromkeys(expected, 0)
    due = {q.job: q.batches[0].step for q in queues if q.batches and not q.batches[0].lengths}
    for place, instruction in enumerate(program.instructions):
        if isinstance(instruction, Step):
            if due.pop(instruction.job, None) != instruction.step:
                problems.append(f"instruction {place}: step {instruction.step} of {instruction.job} is not due")
            continue
        assert isinstance(instruction, ForwardBackward)
        microbatch = instruction.microbatch
        if not microbatch.segments or microbatch.num_tokens > limits.capacity:
            problems.append(f"instruction {place}: {microbatch.num_tokens} tokens; capacity is {limits.capacity}")
        for segment in microbatch.segments:
            job = segment.job
            if job in due:
                problems.append(f"instruction {place}: {job} goes on before its step {due[job]}")
            rest = expected.get(job, [])[seen.get(job, 0) :]
            if not rest or rest[0] != (segment.step, segment.index, segment.length):
                problems.append(f"instruction {place}: {segment} is not the next sample of {job}")
                continue
            seen[job] += 1
            if segment.index == last_index[job, segment.step]:
                due[job] = segment.step
    problems.extend(f"the step {step} of {job} is missing" for job, step in due.items())
    return problems
