"""Runs one stage's instructions of a program with tensors, as `simulate/interpret.py` does with a cost model.

Messages between stages about a job's step are in `step_exchange.py`. On a GPU a whole program is launched before
anything is waited for. Where devices share every layer, the passes of a pair run side by side.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from weft.engine.execute.optimizers.optimizer import PartOfStep, scaling_changes
from weft.engine.execute.protocol import MicrobatchOutcome
from weft.engine.execute.weights import JobWeights
from weft.kernels.adamw import Updated
from weft.kernels.device import is_gpu
from weft.kernels.device_event import DeviceEvent
from weft.model.objective_loss import ReferenceRows
from weft.model.packed import PackedBatch
from weft.model.path import PendingScores
from weft.parallel.stages.shares import part_of_step
from weft.parallel.stages.stage import Stage
from weft.parallel.stages.stage_passes import MicrobatchReferences, stage_reference_pass
from weft.parallel.stages.step_exchange import StepExchange
from weft.parallel.stages.transport import Channel
from weft.parallel.stages.work import Due, StagedWork, StageOutcome, StepOf
from weft.plan.program import Backward, Forward, Instruction, Measure, Receive, Send, Step
from weft.plan.simulate.interpret import describe
from weft.plan.simulate.timeline import BESIDE, COMPUTE, Span
from weft.plan.types import Microbatch


@dataclass
class _Begun:
    number: int
    work: StagedWork
    left: int
    released_rows: list[set[ReferenceRows]]
    """Reference values of jobs that left before this program; they are dropped at its first microbatch."""
    outcome: StageOutcome = field(default_factory=StageOutcome)
    timed: list[tuple[str, DeviceEvent, DeviceEvent, Mapping[str, Any]]] = field(default_factory=list)

    @property
    def pairs(self) -> dict[int, int]:
        first = self.work.first
        return {first + one: first + other for one, other in self.work.program.pairs}


class StageProgram:
    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._exchange = StepExchange(stage)
        self._todo: deque[Instruction] = deque()
        self._begun: list[_Begun] = []
        self._owners: dict[StepOf, _Begun] = {}
        self.ended: list[tuple[int, StageOutcome]] = []
        """Finished programs by number, for the caller to take."""
        self._batches: dict[int, PackedBatch] = {}
        self._references: dict[int, MicrobatchReferences] = {}
        self._entering: dict[int, torch.Tensor] = {}
        self._leaving: dict[int, torch.Tensor] = {}
        self._gradients: dict[int, torch.Tensor] = {}
        self._going_back: dict[int, torch.Tensor] = {}
        self._scores: dict[int, PendingScores] = {}
        self._is_finite: dict[StepOf, torch.Tensor] = {}
        """On the last stage: above 0 as long as all losses are finite."""
        self._stepping: dict[str, tuple[StepOf, Callable[[], Updated]]] = {}
        self._origin = DeviceEvent(stage.backbone.device)
        self._origin.wait()

    def append(self, number: int, work: StagedWork, instructions: Sequence[Instruction], due: Due) -> None:
        own = work.program.stages[self._stage.device]
        if not self._begun:
            # What has happened before is no peak of a program.
            self._stage.meter.pop()
        begun = _Begun(number, work, len(own), self._stage.references.pop_released_rows())
        self._begun.append(begun)
        self._stage.expect(work.program)
        self._exchange.know(work.program)
        self._owners |= {(i.job, i.step): begun for i in own if isinstance(i, Measure | Step)}
        self.go_on(instructions, due)

    def go_on(self, instructions: Sequence[Instruction], due: Due) -> None:
        self._exchange.expect(due)
        self._todo += instructions

    @property
    def has_work(self) -> bool:
        """True if the stage may run an instruction, or has to report a program in which it has none."""
        return bool(self._todo) or (bool(self._begun) and not self._begun[0].left)

    @property
    def oldest(self) -> int:
        return self._begun[0].number

    @property
    def is_over(self) -> bool:
        return not self._begun

    def run(self) -> Generator[None, None, None]:
        """Runs the program's instructions; yields between them, and where another stage must run first."""
        while self._todo:
            first, *beside = self._next()
            if beside:
                self._run_pair(first, *beside)
            else:
                yield from self._run(first)
            for instruction in (first, *beside):
                self._todo.popleft()
                self._program_of(instruction).left -= 1
            if self._todo:
                if not is_gpu(self._stage.backbone.device):
                    self._end_programs()
                yield
        # On a GPU everything is launched before anything is waited for.
        self._end_programs()

    def _next(self) -> list[Instruction]:
        first = self._todo[0]
        if not isinstance(first, Forward | Backward) or self._stage.side_by_side is None:
            return [first]
        other = self._of_microbatch(first.microbatch).pairs.get(first.microbatch)
        return [first] if other is None else [first, type(first)(other)]

    def _program_of(self, instruction: Instruction) -> _Begun:
        if isinstance(instruction, Measure | Step):
            return self._owners[instruction.job, instruction.step]
        return self._of_microbatch(instruction.microbatch)

    def _of_microbatch(self, k: int) -> _Begun:
        return next(begun for begun in reversed(self._begun) if begun.work.first <= k)

    def _end_programs(self) -> None:
        while self._begun and not self._begun[0].left:
            begun = self._begun[0]
            for job, (step, _) in list(self._stepping.items()):
                if self._owners[step] is begun:
                    self._end_step(job)
            first, outcome = begun.work.first, begun.outcome
            for k in range(first, first + len(begun.work.program.microbatches)):
                batch, scores = self._batches.pop(k, None), self._scores.pop(k, None)
                references = self._references.pop(k, None)
                if batch is not None and scores is not None and references is not None:
                    rows = batch.num_rows + references.num_rows
                    found = MicrobatchOutcome(
                        scores.scores(), rows, scores.seconds(), scores.wait(), references.num_rows
                    )
                    outcome.microbatches[k - first] = found
            outcome.spans += [self._span(*timed) for timed in begun.timed]
            outcome.peak = self._stage.meter.pop()
            self._owners = {step: owner for step, owner in self._owners.items() if owner is not begun}
            self._begun.pop(0)
            self.ended.append((begun.number, outcome))

    def _run(self, instruction: Instruction) -> Generator[None, None, None]:
        """Runs one instruction; yields while it waits for another stage."""
        match instruction:
            case Measure(job, step):
                yield from self._measure((job, step))
                return
            case Step(job, step):
                yield from self._step((job, step))
                return
        k = instruction.microbatch
        if not self._microbatch(k).segments:
            ring = self._stage.backbone.ring
            if ring is not None and isinstance(instruction, Forward):
                self._go_empty(self._num_more(k, 0))
            if ring is not None and isinstance(instruction, Forward | Backward):
                with self._before_next():
                    ring.run_empty_pass(back=isinstance(instruction, Backward))
            return
        match instruction:
            case Receive():
                yield from self._receive(k, instruction)
            case Send(is_gradient=is_gradient, to_stage=to_stage):
                if not is_gradient:
                    self._references[k].send()
                tensor = (self._going_back if is_gradient else self._leaving).pop(k)
                self._stage.transport.send(tensor, to_stage, Channel.GRADIENT if is_gradient else Channel.ACTIVATION)
            case Forward() | Backward():
                run = self._pass(instruction)
                with self._before_next():
                    run()

    def _run_pair(self, *pair: Instruction) -> None:
        """Runs two passes side by side; the references of both run before either."""
        assert self._stage.side_by_side is not None and pair == (self._todo[0], self._todo[1]), "pairs are checked"
        passes = [i for i in pair if isinstance(i, Forward | Backward)]
        one, other = (each.microbatch for each in passes)
        self._stage.side_by_side.run([self._pass(passes[0], beside=other), self._pass(passes[1], beside=one)])

    def _pass(self, visit: Forward | Backward, beside: int | None = None) -> Callable[[], None]:
        """One pass of a microbatch, after its references; `beside`: the other of a pair."""
        k = visit.microbatch
        if isinstance(visit, Backward):
            return lambda: self._time_pass("backward", k, lambda: self._backward(k), beside=beside)
        self._run_references(k)
        return lambda: self._time_pass("forward", k, lambda: self._forward(k), beside=beside)

    def _before_next(self) -> AbstractContextManager[object]:
        """Context of the next pass; where devices share the frozen weights, they learn which one follows."""
        ring = self._stage.backbone.ring
        if ring is None:
            return nullcontext()
        following = (i for i in itertools.islice(self._todo, 1, None) if isinstance(i, Forward | Backward))
        return ring.before(back=isinstance(next(following, None), Backward))

    def _receive(self, k: int, receive: Receive) -> Generator[None, None, None]:
        stage, batch = self._stage, self._batch(k)
        if not receive.is_gradient:
            yield from self._references[k].receive()
            self._entering[k] = yield from stage.receive_activation(batch)
            return
        shape, dtype = stage.border(batch.num_rows), stage.backbone.dtype
        while (tensor := stage.transport.receive(shape, dtype, receive.from_stage, Channel.GRADIENT)) is None:
            yield
        self._gradients[k] = tensor

    def _microbatch(self, k: int) -> Microbatch:
        work = self._of_microbatch(k).work
        return work.program.microbatches[k - work.first]

    def _batch(self, k: int) -> PackedBatch:
        """Returns a microbatch; the first call for it also decides which references run before it."""
        if k not in self._batches:
            begun, microbatch = self._of_microbatch(k), self._microbatch(k)
            begun.released_rows.clear()
            self._batches[k] = self._stage.packed(microbatch, begun.work.row_tile)
            self._references[k] = stage_reference_pass(self._stage, microbatch, self._batches[k], begun.work.row_tile)
        return self._batches[k]

    def _run_references(self, k: int) -> None:
        self._batch(k)
        references = self._references[k]
        num_empty = self._num_more(k, references.num_passes)
        if references.num_passes:
            self._time_pass("reference", k, references.run, references.num_rows)
        self._go_empty(num_empty)

    def _num_more(self, k: int, num_passes: int) -> int:
        """Passes that other devices with the same frozen weights run in addition before a microbatch. All exchange
        their numbers before any of them runs one."""
        ring = self._stage.backbone.ring
        if ring is None or not self._of_microbatch(k).work.reads_references:
            return 0
        return ring.most(num_passes) - num_passes

    def _go_empty(self, num_passes: int) -> None:
        ring = self._stage.backbone.ring
        for _ in range(num_passes):
            assert ring is not None
            ring.run_empty_pass(back=False)

    def _forward(self, k: int) -> None:
        entering_TD = self._entering.pop(k, None)
        self._stage.meter.hold(k, self._microbatch(k).num_tokens)
        left_TD = self._stage.runner.forward(k, self._batch(k), self._of_microbatch(k).work.row_tile, entering_TD)
        self._references[k].end()
        if not self._stage.is_last:
            self._leaving[k] = left_TD

    def _backward(self, k: int) -> None:
        back_TD, scores = self._stage.runner.backward(k, self._gradients.pop(k, None))
        self._stage.meter.release(k)
        if back_TD is not None:
            self._going_back[k] = back_TD
        if scores is None:
            return
        self._scores[k] = scores
        owners = [(segment.job, segment.step) for segment in self._microbatch(k).segments]
        named = list(dict.fromkeys(owners))
        found = scores.finite([named.index(owner) for owner in owners], len(named))
        for owner, is_finite in zip(named, found.unbind(), strict=True):
            self._is_finite[owner] = self._is_finite.get(owner, 1.0) * is_finite

    def _measure(self, step: StepOf) -> Generator[None, None, None]:
        is_finite = self._is_finite.pop(step, None)
        if is_finite is None:
            is_finite = torch.ones((), device=self._stage.backbone.device)
        yield from self._exchange.measure(step, is_finite)

    def _step(self, step: StepOf) -> Generator[None, None, None]:
        begun, stage = self._owners[step], self._stage
        if not self._exchange.is_measured(step):
            yield from self._measure(step)
        norm = yield from self._exchange.gradient_norm(step)
        job, weights = step[0], stage.weights_of(step[0])
        if weights is not None:
            self._end_step(job)
            started = DeviceEvent(stage.backbone.device)
            part = part_of_step(norm.norm, stage.replica_shares(job), stage.index)
            self._stepping[job] = step, take_step(weights, begun.work.rates[step], norm.is_finite, part)
            begun.timed.append(self._timed("step", started, {"jobs": {job: 0}, "step": step[1]}))
            if step in begun.work.kept:
                self._end_step(job)
                stage.keep(job, step[1] + 1, begun.work.kept[step])

    def _end_step(self, job: str) -> None:
        if job in self._stepping:
            step, wait = self._stepping.pop(job)
            self._owners[step].outcome.steps[step] = wait()

    def _time_pass(
        self, name: str, k: int, run: Callable[[], None], num_rows: int | None = None, beside: int | None = None
    ) -> None:
        """Runs a pass and records its time. `num_rows`: rows that run; None: the microbatch's. `beside`: microbatch
        that runs meanwhile."""
        devices, started = self._stage.backbone.devices, DeviceEvent(self._stage.backbone.device)
        waited_s = 0.0 if devices is None else devices.waited_s
        run()
        begun = self._of_microbatch(k)
        rows = self._batch(k).num_rows if num_rows is None else num_rows
        args: dict[str, Any] = {"microbatch": k - begun.work.first, "rows": rows}
        if beside is not None:
            args["beside"] = beside - begun.work.first
        elif devices is not None and not is_gpu(self._stage.backbone.device):
            args["sums_s"] = devices.waited_s - waited_s
        begun.timed.append(self._timed(name, started, {**args, **describe(self._microbatch(k))}))

    def _timed(
        self, name: str, started: DeviceEvent, args: Mapping[str, Any]
    ) -> tuple[str, DeviceEvent, DeviceEvent, Mapping[str, Any]]:
        return name, started, DeviceEvent(self._stage.backbone.device), args

    def _span(self, name: str, begun: DeviceEvent, ended: DeviceEvent, args: Mapping[str, Any]) -> Span:
        start_s = self._origin.wait() + begun.seconds_since(self._origin)
        lane = BESIDE if "beside" in args and args["beside"] < args["microbatch"] else COMPUTE
        return Span(name, start_s, ended.seconds_since(begun), args, self._stage.device, lane)


def take_step(weights: JobWeights, rate: float, is_finite: torch.Tensor, part: PartOfStep) -> Callable[[], Updated]:
    """Starts to clip and apply a part of a job's gradient, as one device would the whole. Returns a function that waits
    for it; call it before the job's next step."""
    optimizer, patterns = weights.optimizer, weights.optimizer.spec.learning_rate_pattern
    optimizer.set_rate(rate)
    scale = scaling_changes(patterns, optimizer.adapter) if patterns else None
    if is_gpu(optimizer.adapter.device):
        wait = optimizer.start_part(is_finite, part)
    else:
        stepped = optimizer.step(bool(is_finite > 0), part)
        wait = lambda: stepped  # noqa: E731
    if scale is not None:
        scale()
    optimizer.adapter.changed()

    def result() -> Updated:
        updated = wait()
        weights.after_step(updated)
        return updated

    return result
