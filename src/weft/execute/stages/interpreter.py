"""Runs one stage's instructions of a program with tensors, as `simulate/interpret.py` does with a cost model.

What stages tell each other about a job's step is in `step_exchange.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from weft.backbone.packed import PackedBatch
from weft.backbone.scores import PendingScores
from weft.execute.optimizers.optimizer import PartOfStep
from weft.execute.optimizers.rate_pattern import scaling_changes
from weft.execute.protocol import MicrobatchOutcome, StagedWork
from weft.execute.stages.gradient import part_of_step
from weft.execute.stages.stage import Stage
from weft.execute.stages.step_exchange import StepExchange, StepOf
from weft.execute.stages.transport import ACTIVATION, GRADIENT
from weft.execute.weights import JobWeights
from weft.kernels.adamw import Updated
from weft.plan.program import Backward, Forward, Instruction, Measure, Receive, Send, Step
from weft.simulate.interpret import describe
from weft.simulate.timeline import COMPUTE, Span


@dataclass
class StageOutcome:
    """What one stage did of a program."""

    microbatches: dict[int, MicrobatchOutcome] = field(default_factory=dict)
    """On the last stage of the replica that ran them."""
    steps: dict[StepOf, Updated] = field(default_factory=dict)
    """Without those of jobs that have no share of the stage."""
    spans: list[Span] = field(default_factory=list)


class StageProgram:
    """One stage on its way through its instructions."""

    def __init__(self, stage: Stage, work: StagedWork) -> None:
        self._stage, self._work = stage, work
        self._microbatches = work.program.microbatches
        self._exchange = StepExchange(stage, work.program)
        self._batches: dict[int, PackedBatch] = {}
        self._entering: dict[int, torch.Tensor] = {}
        self._leaving: dict[int, torch.Tensor] = {}
        self._gradients: dict[int, torch.Tensor] = {}
        self._going_back: dict[int, torch.Tensor] = {}
        self._scores: dict[int, PendingScores] = {}
        self._is_finite: dict[StepOf, bool] = {}
        self._done = StageOutcome()

    def run(self) -> Generator[None, None, StageOutcome]:
        """Runs all instructions; it yields where another stage must have its turn first."""
        for instruction in self._work.program.stages[self._stage.device]:
            yield from self._run(instruction)
        self._stage.transport.finish()
        for k, scores in self._scores.items():
            rows = self._batches[k].num_rows
            self._done.microbatches[k] = MicrobatchOutcome(scores.scores(), rows, scores.seconds(), scores.wait())
        return self._done

    def _run(self, instruction: Instruction) -> Generator[None, None, None]:
        """Runs one; it yields as long as what it needs of another stage is not there."""
        match instruction:
            case Measure(job, step):
                is_finite = self._is_finite.pop((job, step), True)
                yield from self._exchange.measure((job, step), is_finite=is_finite)
                return
            case Step(job, step):
                yield from self._step((job, step))
                return
        k = instruction.microbatch
        if not self._microbatches[k].segments:
            return
        match instruction:
            case Receive():
                yield from self._receive(k, instruction)
            case Send(is_gradient=is_gradient, to_stage=to_stage):
                tensor = (self._going_back if is_gradient else self._leaving).pop(k)
                self._stage.transport.send(tensor, to_stage, GRADIENT if is_gradient else ACTIVATION)
            case Forward():
                self._timed("forward", k, lambda: self._forward(k))
            case Backward():
                self._timed("backward", k, lambda: self._backward(k))

    def _receive(self, k: int, receive: Receive) -> Generator[None, None, None]:
        stage, tag = self._stage, GRADIENT if receive.is_gradient else ACTIVATION
        shape, dtype = stage.border(self._batch(k).num_rows), stage.backbone.dtype
        while (tensor := stage.transport.receive(shape, dtype, receive.from_stage, tag)) is None:
            yield
        (self._gradients if receive.is_gradient else self._entering)[k] = tensor

    def _batch(self, k: int) -> PackedBatch:
        if k not in self._batches:
            self._batches[k] = self._stage.packed(self._microbatches[k], self._work.row_tile)
        return self._batches[k]

    def _forward(self, k: int) -> None:
        entering_TD = self._entering.pop(k, None)
        left_TD = self._stage.runner.forward(k, self._batch(k), self._work.row_tile, entering_TD)
        if not self._stage.is_last:
            self._leaving[k] = left_TD

    def _backward(self, k: int) -> None:
        back_TD, scores = self._stage.runner.backward(k, self._gradients.pop(k, None))
        if back_TD is not None:
            self._going_back[k] = back_TD
        if scores is None:
            return
        self._scores[k] = scores
        owners = [(segment.job, segment.step) for segment in self._microbatches[k].segments]
        named = list(dict.fromkeys(owners))
        found = scores.finite([named.index(owner) for owner in owners], len(named)).tolist()
        for owner, is_finite in zip(named, found, strict=True):
            self._is_finite[owner] = self._is_finite.get(owner, True) and is_finite > 0

    def _step(self, step: StepOf) -> Generator[None, None, None]:
        """Steps a job's share as soon as the verdict is there."""
        stage, verdict = self._stage, (yield from self._exchange.verdict(step))
        weights = stage.weights_of(step[0])
        if weights is not None:
            begun_s = time.perf_counter()
            part = part_of_step(verdict.norm, stage.own_shares(step[0]), stage.index)
            self._done.steps[step] = take_step(weights, self._work.rates[step], verdict.is_finite, part)
            self._note("step", begun_s, {"jobs": {step[0]: 0}, "step": step[1]})

    def _timed(self, name: str, k: int, run: Callable[[], None]) -> None:
        begun_s = time.perf_counter()
        run()
        rows = self._batch(k).num_rows
        self._note(name, begun_s, {"microbatch": k, "chunk": 0, "rows": rows, **describe(self._microbatches[k])})

    def _note(self, name: str, begun_s: float, args: Mapping[str, Any]) -> None:
        seconds = time.perf_counter() - begun_s
        self._done.spans.append(Span(name, begun_s, seconds, args, self._stage.device, COMPUTE))


def take_step(weights: JobWeights, rate: float, is_finite: bool, part: PartOfStep) -> Updated:
    """Clips and applies a part of a job's gradient, as one device would all of it."""
    optimizer, patterns = weights.optimizer, weights.optimizer.spec.learning_rate_pattern
    optimizer.set_rate(rate)
    scale = scaling_changes(patterns, optimizer.adapter) if patterns else None
    updated = optimizer.step(is_finite, part)
    if scale is not None:
        scale()
    optimizer.adapter.changed()
    weights.after_step(updated)
    return updated
