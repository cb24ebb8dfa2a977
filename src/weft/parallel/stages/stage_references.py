"""What the jobs of one stage compare with, and what references have been asked.

All stages of a replica have to agree on what is known, without asking each other: all touch microbatches in the same
order, and what a job that leaves has kept is let go of before the first microbatch of the next program. Stages hear at
different moments that it has left.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from weft.engine.execute.protocol import NewJob
from weft.engine.execute.references import JobReference, ReferenceCache
from weft.engine.inference.attach import adapter_on, own_part
from weft.model.backbone import Backbone
from weft.model.reference_rows import ReferenceRows
from weft.parallel.stages.refusals import refuse_method


class StageReferences:
    """By job, whether it has a share of the stage or not."""

    def __init__(self, backbone: Backbone) -> None:
        self._backbone = backbone
        self._known = ReferenceCache(backbone, kept_only=True)
        self._of_jobs: dict[str, JobReference] = {}
        self._left_behind: list[set[ReferenceRows]] = []
        """What was kept for jobs that have left since the last program came."""

    def add(self, job: NewJob) -> tuple[int, Mapping[str, torch.Size] | None]:
        """Makes what a job compares with, if it does: the numbers that an adapter has here, and the shapes of what all
        its modules share, None without any; ConfigError if it does not fit a backbone in parts."""
        data, adapter = job.batches.data, job.reference
        if not data.reads_reference:
            return 0, None
        self._of_jobs[job.spec.name] = JobReference(self._known, data, adapter)
        if adapter is None:
            return 0, None
        where = "reference" if data.distillation is None else "teacher"
        refuse_method(adapter.spec, self._backbone, where)
        own = own_part(self._backbone, adapter)
        if own is None:
            return 0, None
        # Only to see that it fits; it is made again when it takes its slot.
        made = adapter_on(self._backbone, own)
        return made.num_parameters, {name: tensor.shape for name, tensor in made.shared.items()}

    def of(self, job: str) -> JobReference | None:
        """What a job compares with, if it does."""
        return self._of_jobs.get(job)

    def drop(self, job: str) -> None:
        """Forgets a job."""
        self._of_jobs.pop(job, None)

    def leave(self, job: str) -> None:
        """A job is about to leave; what it has kept stays until the next program."""
        if job in self._of_jobs:
            self._left_behind.append(self._of_jobs[job].forget())

    def pop_released_rows(self) -> list[set[ReferenceRows]]:
        """What jobs have left behind; whoever takes it lets go of it before the first microbatch of a program."""
        found, self._left_behind = self._left_behind, []
        return found

    def forget(self) -> None:
        """Lets go of all that has been said, where something failed: other stages may have come further, or not."""
        for reference in self._of_jobs.values():
            reference.forget()
        self._left_behind.clear()
        self._known.forget()
