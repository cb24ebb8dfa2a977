"""Mean loss and token accuracy on evaluation samples: one pass of the frozen model serves all jobs that are due."""

from __future__ import annotations

from collections.abc import Sequence

from weft.backbone.backbone import Backbone
from weft.backbone.packed import Placed, pack_samples
from weft.data.sample import Sample
from weft.engine.live_job import EvalResult, LiveJob
from weft.engine.timeline import TimelineRecorder
from weft.objectives.metrics import MeanScores, Tally

ScoreRequest = tuple[int | None, Sequence[Sample]]
"""A slot (None: the bare backbone) and what it is evaluated on."""


def mean_scores(backbone: Backbone, requests: Sequence[ScoreRequest], capacity: int, row_tile: int) -> list[MeanScores]:
    """Per request its means, summed sample by sample in the given order; NaN if nothing is supervised."""
    placed = [(which, Placed(s, slot)) for which, (slot, samples) in enumerate(requests) for s in samples]
    tallies = [Tally() for _ in requests]
    start = 0
    while start < len(placed):
        end, tokens = start, 0
        while end < len(placed) and (end == start or tokens + placed[end][1].sample.length <= capacity):
            tokens += placed[end][1].sample.length
            end += 1
        batch = pack_samples([p for _, p in placed[start:end]], row_tile, backbone.device)
        for (which, _), score in zip(placed[start:end], backbone.scores(batch, row_tile), strict=True):
            tallies[which].add(score)
        start = end
    return [tally.means() for tally in tallies]


def evaluate_due(
    backbone: Backbone, jobs: Sequence[LiveJob], capacity: int, row_tile: int, timeline: TimelineRecorder
) -> None:
    """Evaluates jobs at their last step in the same microbatches; each keeps its result until that is told."""
    tokens = {job.spec.name: job.data.eval.summary.num_tokens for job in jobs if job.data.eval is not None}
    requests = [(job.slot, job.data.eval.samples) for job in jobs if job.data.eval is not None]
    assert len(requests) == len(jobs), "only jobs with evaluation data are due"
    with timeline.span("eval", jobs=tokens):
        found = mean_scores(backbone, requests, capacity, row_tile)
    whole_s, total = timeline.spans[-1].duration_s, max(sum(tokens.values()), 1)
    for job, means in zip(jobs, found, strict=True):
        job.looked = EvalResult(job.step, means, whole_s * tokens[job.spec.name] / total)
