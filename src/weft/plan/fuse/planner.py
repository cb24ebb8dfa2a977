"""From tasks to a pipeline template: which tasks are fused, which fused tasks share a clock, and in which order.

Problem: min makespan of one global batch of every task on the pipeline. The latency that fusion minimises is a model of
it that leaves out most of filling and draining the pipeline. So two partitions go on: the one of least latency, and, of
the best for 1, 2, … fused tasks, the one whose template takes the least time. For both, and for every number of buckets
P from all in one to one each, buckets of least variance of first-stage seconds are formed and their template is played
through. The least makespan wins, ties to what came first; a P with a bucket that does not fit in memory is passed over.

Complexity: fusion, plus 3 n templates of O(S · P · C) passes. Tests prove the result never slower than any bucketing of
the partition of least latency, and that every task is in it exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weft.plan.fuse.buckets import balance
from weft.plan.fuse.partition import Fusion, fuse_by_count
from weft.plan.fuse.tasks import FuseTask, Pipe
from weft.plan.fuse.template import Template, build_template, fits_alone


@dataclass(frozen=True, slots=True)
class FusionPlan:
    """Fused tasks and the order in which they go through the pipeline."""

    fusion: Fusion
    template: Template


def plan_fusion(tasks: Sequence[FuseTask], pipe: Pipe) -> FusionPlan:
    """The plan of least makespan found for one global batch of every task."""
    fusions = fuse_by_count(tasks, pipe)
    modelled = min(fusions, key=lambda f: f.latency_s)
    played = min(fusions, key=lambda f: build_template(f.fused, _singles(f), pipe).makespan_s)
    plans = [
        FusionPlan(fusion, template)
        for fusion in ([modelled, played] if played is not modelled else [modelled])
        for template in bucket_templates(fusion, pipe)
    ]
    return min(plans, key=lambda p: p.template.makespan_s)


def bucket_templates(fusion: Fusion, pipe: Pipe) -> Iterator[Template]:
    """The template of the most even buckets, for every number of buckets that fits in memory."""
    fused = fusion.fused
    weights = [pipe.forward_s(f, 0) for f in fused]
    for num_buckets in range(1, len(fused) + 1):
        buckets = balance(weights, num_buckets).buckets
        if all(fits_alone([fused[i] for i in bucket], pipe) for bucket in buckets):
            yield build_template(fused, buckets, pipe)


def _singles(fusion: Fusion) -> list[tuple[int]]:
    return [(i,) for i in range(len(fusion.fused))]
