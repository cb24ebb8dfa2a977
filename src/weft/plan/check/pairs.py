"""What is wrong with the pairs of a program: microbatches that are to run side by side, and cannot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from weft.plan.program import Backward, Forward, Program


def not_side_by_side(program: Program) -> Iterator[str]:
    """Pairs of which one would write what the other reads or writes, or between which a stage does something else."""
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
        for place, i in enumerate(instructions):
            if not isinstance(i, Forward | Backward):
                continue
            if i.microbatch in beside:
                wanted, neighbour = type(i)(beside[i.microbatch]), instructions[place + 1 : place + 2]
            elif i.microbatch in seconds:
                wanted, neighbour = type(i)(seconds[i.microbatch]), instructions[max(place - 1, 0) : place]
            else:
                continue
            if neighbour != (wanted,):
                yield f"stage {stage}, instruction {place}: {i} does not stand beside {wanted}, with which it is a pair"
