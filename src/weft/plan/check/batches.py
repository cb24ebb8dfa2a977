"""The global batches of a program, and on which replicas they are."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from weft.plan.program import Forward, Program
from weft.plan.types import JobQueue

CheckedBatch = tuple[str, int]
"""Job and step."""


class CheckedBatches:
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


def off_home_replica(program: Program, batches: CheckedBatches) -> Iterator[str]:
    """Microbatches with samples of jobs that are at home on another replica."""
    for k, own in enumerate(batches.of):
        for job, _ in own:
            if batches.replica_of[k] not in batches.steps_on[job]:
                yield f"microbatch {k} is on replica {batches.replica_of[k]}, where {job} is not at home"
