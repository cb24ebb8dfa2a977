"""The whole idea: one microbatch of many jobs through one backbone, then each job steps by itself.

for every segment:   its sample, its slot, its weight 1 / (supervised tokens of its job's global batch)
one packed buffer →  the backbone runs once for all; each slot adds its A and B on its own rows
per-segment scores → each to its own job;   gradients → each into its own adapter
Step(job)          → that job alone is checked, clipped, stepped
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from weft.backbone.backbone import Backbone
from weft.backbone.packed import PackedBatch, pack_samples
from weft.engine.live_job import LiveJob
from weft.plan.types import Microbatch


def prepare(backbone: Backbone, jobs: Mapping[str, LiveJob], microbatch: Microbatch, row_tile: int) -> PackedBatch:
    """One buffer with every segment's sample. Changes no job, so it may be made early and thrown away."""
    placed = [jobs[segment.job].place(segment) for segment in microbatch.segments]
    return pack_samples(placed, row_tile, backbone.device)


def run_microbatch(
    backbone: Backbone,
    jobs: Mapping[str, LiveJob],
    microbatch: Microbatch,
    batch: PackedBatch,
    row_tile: int,
    meanwhile: Callable[[], None],
) -> None:
    """Adds every segment's score and gradients to its job; a GPU works while `meanwhile` runs."""
    running = backbone.launch(batch, row_tile)
    meanwhile()
    for segment, score in zip(microbatch.segments, running.scores(), strict=True):
        jobs[segment.job].add_score(segment, score)
