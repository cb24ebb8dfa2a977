"""The bubble lemma (LoRAFusion §5.2): how far apart a job's global batches must lie in a pipeline's stream.

In a pipeline of S stages, if a sample of a job's global batch j is in microbatch k, no sample of its batch j + 1 is in
a microbatch before k + S − 1, since only then the backward of the former is done. A microbatch without segments is a
no-op and counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.errors import PlanError
from weft.plan.types import Microbatch


def lemma_distance(num_stages: int) -> int:
    """Microbatches from the last of a job's global batch to the first of its next: stages − 1, and at least 1."""
    if num_stages < 1:
        raise PlanError(f"num_stages is {num_stages}; use at least 1.")
    return max(num_stages - 1, 1)


def lemma_violations(stream: Sequence[Microbatch], apart: int) -> list[str]:
    """Where a job's next global batch comes less than `apart` microbatches after its last; empty if nowhere."""
    newest: dict[str, tuple[int, int]] = {}
    """Of each job: its latest batch so far, and the last microbatch that holds a sample of that or an earlier one."""
    before: dict[str, int] = {}
    """Of each job: the last microbatch that holds a sample of a batch before its latest."""
    problems: list[str] = []
    for place, microbatch in enumerate(stream):
        for job, step in sorted({(s.job, s.step) for s in microbatch.segments}):
            latest, last = newest.get(job, (step, place))
            if step < latest:
                problems.append(f"microbatch {place}: step {step} of {job} comes after its step {latest} has begun")
                continue
            if step > latest:
                before[job] = last
            if job in before and place < before[job] + apart:
                problems.append(
                    f"microbatch {place}: step {step} of {job} comes {place - before[job]} after the one before it; "
                    f"at least {apart} are needed"
                )
            newest[job] = (step, place)
    return problems
