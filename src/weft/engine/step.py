"""The whole idea: one microbatch of many jobs through one backbone, then each job steps by itself.

for every segment:   its sample, its slot, its weight 1 / (supervised tokens of its job's global batch)
one packed buffer →  the backbone runs once for all; each slot adds its A and B on its own rows
per-segment losses → each to its own job;   gradients → each into its own adapter
Step(job)          → that job alone is checked, clipped, stepped
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.backbone.backbone import Backbone
from weft.backbone.packed import pack_samples
from weft.engine.live_job import LiveJob
from weft.plan.types import Microbatch


def run_microbatch(backbone: Backbone, jobs: Mapping[str, LiveJob], microbatch: Microbatch, row_tile: int) -> int:
    """Adds every segment's loss and gradients to its job; returns the rows computed."""
    placed = [jobs[segment.job].place(segment) for segment in microbatch.segments]
    batch = pack_samples(placed, row_tile, backbone.device)
    losses = backbone.forward_backward(batch, row_tile)
    for segment, loss in zip(microbatch.segments, losses, strict=True):
        jobs[segment.job].add_loss(loss)
    return len(batch.input_ids_T)
