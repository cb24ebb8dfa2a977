"""Evaluates jobs on one stage: microbatches go forward only, each behind what it has to know of references."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack

from weft.engine.execute.evaluate import ScoreRequest, evaluation_microbatches, evaluation_rows, mean_of
from weft.engine.execute.protocol import EvaluationWork
from weft.model.packed import PackedBatch, pack_samples
from weft.model.scores import PendingScores
from weft.objectives.metrics import MeanScores
from weft.parallel.stages.hearing import Hearing
from weft.parallel.stages.stage import Stage
from weft.parallel.stages.transport import Channel

MOST_AHEAD = 8
"""Microbatches that a stage sends before it waits for the next one to take them."""


def evaluate_jobs(stage: Stage, work: EvaluationWork) -> Generator[None, None, list[MeanScores]]:
    """Evaluates jobs; only the last stage knows the means. It yields where another stage must have its turn."""
    running: list[tuple[list[int], PendingScores]] = []
    num_sent = 0
    with ExitStack() as slots:
        requests = [slots.enter_context(stage.evaluated(name)) for name in work.jobs]
        ring, num_empty = stage.backbone.ring, 0
        microbatches: Iterable[tuple[list[int], PackedBatch, Hearing]] = _microbatches(stage, requests, work)
        if ring is not None:
            microbatches = list(microbatches)
            num_passes = sum(1 + hearing.num_passes for _, _, hearing in microbatches)
            num_empty = ring.most(num_passes) - num_passes
        for owners, batch, hearing in microbatches:
            entering_TD = None
            if not stage.is_first:
                yield from hearing.receive()
                entering_TD = yield from stage.receive_activation(batch)
            hearing.run()
            hearing.send()
            left_TD, scores = stage.runner.look(batch, work.row_tile, entering_TD)
            hearing.end()
            if scores is not None:
                running.append((owners, scores))
                continue
            stage.transport.send(left_TD, stage.device + 1, Channel.ACTIVATION)
            num_sent += 1
            if num_sent % MOST_AHEAD == 0:
                stage.transport.finish()
        stage.transport.finish()
        for _ in range(num_empty):
            assert ring is not None
            ring.run_empty_pass(back=False)
    return mean_of(running, len(requests)) if stage.is_last else []


def _microbatches(
    stage: Stage, requests: Sequence[ScoreRequest], work: EvaluationWork
) -> Iterator[tuple[list[int], PackedBatch, Hearing]]:
    """All that runs, with the request of each sample; none where there is nothing to evaluate."""
    if not requests:
        return
    for owners, placed in evaluation_microbatches(stage.backbone, requests, work.capacity, work.row_tile):
        batch = pack_samples(placed, work.row_tile, stage.backbone.device)
        asked = evaluation_rows(requests, owners, batch)
        yield owners, batch, Hearing(stage, asked, work.row_tile, work.capacity)
