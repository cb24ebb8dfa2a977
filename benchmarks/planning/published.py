"""LoRAFusion's bubble lemma, as a property that any stream can be checked for."""

from __future__ import annotations

from collections.abc import Sequence

from weft.plan.types import Microbatch


def lemma_violations(stream: Sequence[Microbatch], apart: int) -> list[str]:
    """Where a job's next global batch comes less than `apart` microbatches after its last; empty if nowhere."""
    newest: dict[str, tuple[int, int]] = {}
    """Of each job: its latest batch so far, and the last microbatch that holds a sample of that or an earlier one."""
    before: dict[str, int] = {}
    """Of each job: the last microbatch that holds a sample of a batch before its latest."""
    problems: list[str] = []
    for number, microbatch in enumerate(stream):
        for job, step in sorted({(s.job, s.step) for s in microbatch.segments}):
            latest, last = newest.get(job, (step, number))
            if step < latest:
                problems.append(f"microbatch {number}: step {step} of {job} comes after its step {latest} has begun")
                continue
            if step > latest:
                before[job] = last
            if job in before and number < before[job] + apart:
                problems.append(
                    f"microbatch {number}: step {step} of {job} comes {number - before[job]} after the one before it; "
                    f"at least {apart} are needed"
                )
            newest[job] = (step, number)
    return problems
