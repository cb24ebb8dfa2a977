"""Passes through one stage besides training: references, evaluations and answers.

As on one device, a reference runs before the first microbatch that needs it: its samples go from stage to stage right
before that microbatch, forward only and by the same channel, so no plan contains them. Only the last stage computes the
log-probabilities; the others know which samples have been read (`StageReferences`).

For each token of an answer a pass goes through all stages, and every stage keeps the keys and values of its own layers.
The last stage chooses the tokens as one device does and sends them to all others, so that each knows which answers have
ended and what comes next. Passes have the same prompts as on one device, and so the same bits; as many passes are under
way as there are stages.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack

import torch

from weft.engine.execute.evaluate import (
    EvaluationBatch,
    RunningBatch,
    ScoreRequest,
    evaluated_parts,
    evaluation_microbatches,
    evaluation_rows,
)
from weft.engine.execute.protocol import AnswersWork, EvaluatedPart, EvaluationWork
from weft.engine.execute.references import ReferencePass, RequestedRows, reference_passes, requested_rows
from weft.engine.inference.generate import BATCH, Continuation, Finished, end_tokens, requests_of
from weft.engine.inference.read import last_rows, pack_new, scores_of
from weft.engine.inference.sampling import Sampler, TokenLogprobs
from weft.model.packed import PackedBatch, pack_samples
from weft.parallel.stages.stage import Stage
from weft.parallel.stages.transport import Channel, Route
from weft.plan.types import Microbatch


class MicrobatchReferences:
    def __init__(self, stage: Stage, rows: Sequence[RequestedRows], row_tile: int, limit: int) -> None:
        """Marks all `rows` as coming; passes have at most `limit` tokens or one sample."""
        self._stage, self._row_tile = stage, row_tile
        self._rows = rows
        self._entering: deque[torch.Tensor] = deque()
        self._leaving: list[torch.Tensor] = []
        self._passes: list[tuple[ReferencePass, PackedBatch]] = []
        for each in reference_passes(rows, limit):
            for one in each.rows:
                one.rows.is_coming = True
            self._passes.append((each, each.packed(row_tile, stage.backbone.device)))

    @property
    def num_passes(self) -> int:
        return len(self._passes)

    @property
    def num_rows(self) -> int:
        return sum(batch.num_rows for _, batch in self._passes)

    def receive(self) -> Generator[None, None, None]:
        for _, batch in self._passes:
            self._entering.append((yield from self._stage.receive_activation(batch)))

    def run(self) -> None:
        stage = self._stage
        for each, batch in self._passes:
            entering_TD = self._entering.popleft() if self._entering else None
            left = stage.runner.read(batch, self._row_tile, entering_TD)
            if stage.is_last:
                each.learn(stage.backbone, batch, left)
            else:
                self._leaving.append(left)
                for one in each.rows:
                    one.rows.learn()

    def send(self) -> None:
        for left_TD in self._leaving:
            self._stage.transport.send(left_TD, self._stage.device + 1, Channel.ACTIVATION)
        self._leaving.clear()

    def end(self) -> None:
        """Drops values that are not kept; the microbatch has read them."""
        for each in self._rows:
            if not each.reference.keeps:
                each.rows.free_values()


def stage_reference_pass(
    stage: Stage, microbatch: Microbatch, batch: PackedBatch, row_tile: int
) -> MicrobatchReferences:
    requests = {name: stage.request(name) for name in microbatch.job_tokens}
    return MicrobatchReferences(stage, requested_rows(microbatch, batch, row_tile, requests), row_tile, batch.num_rows)


_StageBatch = tuple[EvaluationBatch, PackedBatch, MicrobatchReferences]


MOST_AHEAD = 8
"""Microbatches that a stage sends before it waits for the next stage to receive them."""


def evaluate_jobs(stage: Stage, work: EvaluationWork) -> Generator[None, None, list[EvaluatedPart]]:
    """Evaluates jobs; only the last stage returns parts. Yields where another stage must run first."""
    running: list[RunningBatch] = []
    num_sent = 0
    with ExitStack() as slots:
        requests = [
            slots.enter_context(stage.evaluated(name))._replace(after=work.after.get(name, EvaluatedPart()))
            for name in work.jobs
        ]
        ring, num_empty = stage.backbone.ring, 0
        microbatches: Iterable[_StageBatch] = _microbatches(stage, requests, work)
        if ring is not None:
            microbatches = list(microbatches)
            num_passes = sum(1 + references.num_passes for _, _, references in microbatches)
            num_empty = ring.most(num_passes) - num_passes
        for microbatch, batch, references in microbatches:
            entering_TD = None
            if not stage.is_first:
                yield from references.receive()
                entering_TD = yield from stage.receive_activation(batch)
            references.run()
            references.send()
            left_TD, scores = stage.runner.look(batch, work.row_tile, entering_TD)
            references.end()
            if scores is not None:
                running.append((microbatch, scores))
                continue
            stage.transport.send(left_TD, stage.device + 1, Channel.ACTIVATION)
            num_sent += 1
            if num_sent % MOST_AHEAD == 0:
                stage.transport.finish()
        stage.transport.finish()
        for _ in range(num_empty):
            assert ring is not None
            ring.run_empty_pass(back=False)
    return evaluated_parts(running, requests) if stage.is_last else []


def _microbatches(stage: Stage, requests: Sequence[ScoreRequest], work: EvaluationWork) -> Iterator[_StageBatch]:
    """The microbatches of this slice; none without evaluation data."""
    if not requests:
        return
    microbatches = evaluation_microbatches(stage.backbone, requests, work.capacity, work.row_tile)
    for microbatch in itertools.islice(microbatches, work.max_microbatches):
        batch = pack_samples(microbatch.samples, work.row_tile, stage.backbone.device)
        rows = evaluation_rows(requests, microbatch.owners, batch)
        yield microbatch, batch, MicrobatchReferences(stage, rows, work.row_tile, work.capacity)


OpenRequest = tuple[Continuation, int]
"""A continuation, and the number of rows that its job's adapter puts in front of the prompt."""


def answer_prompts(stage: Stage, work: AnswersWork) -> Generator[None, None, list[list[Finished]]]:
    """All answers by job, on the last stage only. Yields where another stage must run first."""
    ring = stage.backbone.ring
    with ExitStack() as slots:
        rows = {name: _requests_of(stage, work, name, slots) for name in work.prompts}
        flat = [one for own in rows.values() for one in own]
        waiting = deque(_Group(stage, flat[start : start + BATCH]) for start in range(0, len(flat), BATCH))
        under_way: deque[_Group] = deque()
        stage.transport.open(_routes(stage))
        while waiting or under_way:
            if waiting and len(under_way) < stage.num_stages:
                group = waiting.popleft()
            else:
                group = under_way.popleft()
                yield from group.take_choice()
                if not group.going:
                    continue
            if ring is not None:
                ring.most(1)
            yield from group.run()
            under_way.append(group)
        stage.transport.finish()
        while ring is not None and ring.most(0):
            # Devices that share the frozen weights continue until the longest answer has ended.
            ring.run_empty_pass(back=False)
    return [[item.finished for item, _ in own] for own in rows.values()] if stage.is_last else []


class _Group:
    def __init__(self, stage: Stage, rows: Sequence[OpenRequest]) -> None:
        self._stage = stage
        self._ends, self._longest = end_tokens(stage.backbone), stage.backbone.max_positions
        self._chosen: list[int] = []
        self._logprobs: Sequence[TokenLogprobs | None] = ()
        self._sampler = Sampler()
        self.going = list(rows)

    def run(self) -> Generator[None, None, None]:
        stage, items = self._stage, [item for item, _ in self.going]
        read = yield from _read(stage, self.going)
        if read is None:
            return
        batch, hidden_TD = read
        rows = last_rows(batch)
        logits_NV = stage.backbone.logits_of(hidden_TD[rows], batch.slots_at(rows))
        chosen = self._sampler.choose(logits_NV, items)
        for other in range(stage.device - stage.index, stage.device):
            stage.transport.send(chosen.tokens_R, other, Channel.CHOICE)
        self._chosen, self._logprobs = chosen.to_host()

    def take_choice(self) -> Generator[None, None, None]:
        stage, chosen = self._stage, self._chosen
        if not stage.is_last:
            shape, last = (len(self.going),), stage.device - stage.index + stage.num_stages - 1
            while (received := stage.transport.receive(shape, torch.int64, last, Channel.CHOICE)) is None:
                yield
            chosen = received.tolist()
        logprobs = self._logprobs if stage.is_last else [None] * len(chosen)
        for (item, num_leading), token, own in zip(self.going, chosen, logprobs, strict=True):
            item.write(token, self._ends, self._longest, num_leading, own)
        self.going = [one for one in self.going if not one[0].is_over]


def _read(stage: Stage, going: Sequence[OpenRequest]) -> Generator[None, None, tuple[PackedBatch, torch.Tensor] | None]:
    """Reads the new tokens of continuations; returns the last stage's hidden states."""
    items, leading = [item for item, _ in going], [num_leading for _, num_leading in going]
    batch = pack_new(items, leading, stage.backbone.device)
    entering_TD = None if stage.is_first else (yield from stage.receive_activation(batch))
    left_TD = stage.backbone.read_on(batch, [item.cache for item in items], entering_TD)
    if stage.is_last:
        return batch, left_TD
    stage.transport.send(left_TD, stage.device + 1, Channel.ACTIVATION)
    return None


def read_prompts(
    stage: Stage, items: Sequence[Continuation], kept: Collection[int], scored: Sequence[int]
) -> Generator[None, None, tuple[list[int], Sequence[TokenLogprobs | None]]]:
    """One pass over continuations whose tokens another process has (`StagedPrompts`), which also names all whose keys
    and values are still needed. The last stage returns the chosen tokens, or the log-probabilities of `scored`."""
    prompts, ring = stage.prompts, stage.backbone.ring
    prompts.keep(kept)
    has_empty_pass = ring is not None and ring.most(len(items) and 1) > (len(items) and 1)
    if ring is not None and has_empty_pass:
        ring.run_empty_pass(back=False)
    if not items:
        return [], []
    stage.transport.open(_routes(stage))
    read = yield from _read(stage, [prompts.open(item) for item in items])
    stage.transport.finish()
    if read is None:
        return [], []
    batch, hidden_TD = read
    if scored:
        num_top = items[0].decoding.prompt_logprobs or 0
        slot = items[0].request.slot
        return [], scores_of(stage.backbone, hidden_TD[-len(items[0].new) :], scored, slot, num_top)
    rows = last_rows(batch)
    logits_NV = stage.backbone.logits_of(hidden_TD[rows], batch.slots_at(rows))
    return Sampler().choose(logits_NV, items).to_host()


def _requests_of(stage: Stage, work: AnswersWork, job: str, slots: ExitStack) -> list[OpenRequest]:
    """Requests of a job; its slot is kept as long as `slots` are."""
    slot = None if work.is_bare else slots.enter_context(stage.slot_of(job))
    num_leading = 0 if work.is_bare else stage.leading_rows(job)
    requests = requests_of(work.prompts[job], slot, work.decoding.n)
    return [(Continuation(request, work.decoding), num_leading) for request in requests]


def _routes(stage: Stage) -> set[Route]:
    first, last = stage.device - stage.index, stage.device - stage.index + stage.num_stages - 1
    onward = {Route(Channel.ACTIVATION, source, source + 1) for source in range(first, last)}
    return onward | {Route(Channel.CHOICE, last, target) for target in range(first, last)}
