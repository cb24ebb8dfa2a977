"""The whole idea: one microbatch of many jobs through one backbone, then each job steps by itself.

for every segment:   its sample, its slot, its weight 1 / (supervised tokens of its job's global batch)
one packed buffer →  the backbone runs once for all; each slot adds its A and B on its own rows
per-segment scores → each to its own job;   gradients → each into its own adapter
Step(job)          → that job alone is checked, clipped, stepped
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from weft.backbone.backbone import Backbone
from weft.backbone.packed import PackedBatch, pack_samples
from weft.engine.live_job import LiveJob, StepResult, begin_steps
from weft.plan.types import Microbatch


def prepare(backbone: Backbone, jobs: Mapping[str, LiveJob], microbatch: Microbatch, row_tile: int) -> PackedBatch:
    """One buffer with every segment's sample. Changes no job, so it may be made early and thrown away."""
    placed = [jobs[segment.job].place(segment) for segment in microbatch.segments]
    return pack_samples(placed, row_tile, backbone.device)


class MicrobatchInFlight:
    """A microbatch that has been started: every segment's gradients go to its job, as soon as the device gets there."""

    def __init__(
        self,
        backbone: Backbone,
        jobs: Mapping[str, LiveJob],
        microbatch: Microbatch,
        batch: PackedBatch,
        row_tile: int,
    ) -> None:
        self.microbatch = microbatch
        self.num_rows = batch.num_rows
        self._owners = [jobs[segment.job] for segment in microbatch.segments]
        self._rewinds = [job.num_rewinds for job in self._owners]
        self._running = backbone.launch(batch, row_tile)

    def begin_steps(self, jobs: Sequence[LiveJob]) -> Callable[[], list[StepResult]]:
        """Starts the steps of jobs whose global batch ends here, behind it and before it is counted."""
        places = {job.spec.name: place for place, job in enumerate(jobs)}
        owners = [places.get(job.spec.name, -1) for job in self._owners]
        return begin_steps(jobs, self._running.finite(owners, len(jobs)))

    def wait(self) -> float:
        """Until the device has done it; returns when that was first known, by `time.perf_counter`."""
        return self._running.wait()

    def count(self) -> float:
        """Waits for it and adds every segment's score to its job; returns its seconds.

        A job that has gone back to its last step in the meantime runs its samples again, and counts them then.
        """
        scores = self._running.scores()
        for job, before, segment, score in zip(
            self._owners, self._rewinds, self.microbatch.segments, scores, strict=True
        ):
            if job.num_rewinds == before:
                job.add_score(segment, score)
        return self._running.seconds()
