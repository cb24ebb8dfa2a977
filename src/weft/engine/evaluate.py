"""Mean loss of jobs on their evaluation samples: one pass of the frozen model serves all jobs that are due."""

from __future__ import annotations

from collections.abc import Sequence

from weft.backbone.backbone import Backbone
from weft.backbone.packed import Placed, pack_samples
from weft.data.sample import Sample
from weft.engine.live_job import LiveJob, Looked
from weft.engine.timeline import Timeline


def mean_losses(
    backbone: Backbone, requests: Sequence[tuple[int | None, Sequence[Sample]]], capacity: int, row_tile: int
) -> list[float]:
    """Per (slot, samples): mean loss over the supervised tokens, summed sample by sample in the given order."""
    placed = [(which, Placed(s, slot)) for which, (slot, samples) in enumerate(requests) for s in samples]
    sums, counts = [0.0] * len(requests), [0] * len(requests)
    start = 0
    while start < len(placed):
        end, tokens = start, 0
        while end < len(placed) and (end == start or tokens + placed[end][1].sample.length <= capacity):
            tokens += placed[end][1].sample.length
            end += 1
        batch = pack_samples([p for _, p in placed[start:end]], row_tile, backbone.device)
        for (which, item), loss in zip(placed[start:end], backbone.losses(batch, row_tile), strict=True):
            sums[which] += loss
            counts[which] += item.sample.num_supervised
        start = end
    return [total / count if count else float("nan") for total, count in zip(sums, counts, strict=True)]


def evaluate_due(backbone: Backbone, jobs: Sequence[LiveJob], capacity: int, row_tile: int, timeline: Timeline) -> None:
    """Evaluates jobs at their last step in the same microbatches; each keeps its result until that is told."""
    tokens = {job.spec.name: job.data.eval.summary.num_tokens for job in jobs if job.data.eval is not None}
    requests = [(job.slot, job.data.eval.samples) for job in jobs if job.data.eval is not None]
    assert len(requests) == len(jobs), "only jobs with evaluation data are due"
    with timeline.span("eval", jobs=tokens):
        losses = mean_losses(backbone, requests, capacity, row_tile)
    whole_s, total = timeline.spans[-1].duration_s, max(sum(tokens.values()), 1)
    for job, loss in zip(jobs, losses, strict=True):
        job.looked = Looked(job.step, loss, whole_s * tokens[job.spec.name] / total)
