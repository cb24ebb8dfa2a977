"""Executes programs with a cost model instead of tensors.

A stage runs its list in order, in three lanes, as mLoRA's three streams: it computes, sends (one transfer at a time,
while it computes on) and receives. Empty microbatches cost nothing. Measuring a gradient takes no time, but the root
stage waits for all parts, and the others step after it. Devices in step begin a pass together. Both passes of a pair
begin and end together. Replicas have a cost model each; the exchange of gradients between them is free.
O(instructions).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.errors import PlanError
from weft.plan.cost.learned import AdapterTimes
from weft.plan.cost.types import CostModel
from weft.plan.program import Backward, Forward, Instruction, Measure, Program, Receive, Send, Step
from weft.plan.simulate.timeline import BESIDE, COMPUTE, RECEIVE, RECEIVE_GRADIENT, SEND, MemoryPoint, Span, Timeline
from weft.plan.simulate.two_streams import PairTimes
from weft.plan.types import Microbatch

Parcel = tuple[int, int, bool]
"""Microbatch, target stage, and whether it is a gradient."""


@dataclass
class _StageRun:
    rest: deque[Instruction]
    own: range
    cost: CostModel
    free_at: float = 0.0
    send_free_at: float = 0.0
    held: int = 0
    num_passes: int = 0
    spans: list[Span] = field(default_factory=list)
    memory: list[MemoryPoint] = field(default_factory=list)


def simulate(
    program: Program,
    cost: CostModel | Sequence[CostModel],
    *,
    adapters: AdapterTimes | None = None,
    pairs: PairTimes | None = None,
) -> Timeline:
    """The predicted timeline of any program; a PlanError if its stages deadlock. `cost`: one model for all replicas, or
    one for each. `adapters`: what a microbatch's jobs add to each pass. `pairs`: the time of two passes side by side;
    None: as long as in sequence."""
    costs = cost if isinstance(cost, Sequence) else [cost] * len(program.replicas)
    run = _Run(program, costs, adapters, pairs)
    waiting = deque(stage for stage, instructions in enumerate(program.stages) if instructions)
    idle = 0
    while waiting and idle < len(waiting):
        stage = waiting.popleft()
        progressed = run.advance(stage)
        idle = 0 if progressed else idle + 1
        if run.stages[stage].rest:
            waiting.append(stage)
    if waiting:
        stage = min(waiting)
        raise PlanError(f"stage {stage} waits for ever at {run.stages[stage].rest[0]}; no stage sends it.")
    spans = sorted(itertools.chain.from_iterable(s.spans for s in run.stages), key=lambda s: (s.start_s, s.stage))
    memory = tuple(point for s in run.stages for point in s.memory)
    return Timeline(tuple(spans), program.num_stages, memory)


class _Run:
    def __init__(
        self,
        program: Program,
        costs: Sequence[CostModel],
        adapters: AdapterTimes | None,
        pairs: PairTimes | None,
    ) -> None:
        self.program, self.pairs = program, pairs
        self.beside = dict(program.pairs)
        owners = [(own, cost) for own, cost in zip(program.replicas, costs, strict=True) for _ in own]
        self.stages = [
            _StageRun(deque(instructions), *owner) for instructions, owner in zip(program.stages, owners, strict=True)
        ]
        self.measuring = program.measuring
        self.added_s = [adapters.microbatch_s(m.job_tokens) if adapters else 0.0 for m in program.microbatches]
        self.lengths = [[s.length for s in m.segments] for m in program.microbatches]
        self.notes = [describe(m) for m in program.microbatches]
        self.arrivals: dict[Parcel, float] = {}
        self.measured: dict[Measure, list[float]] = {}
        self.norms_at: dict[Measure, float] = {}
        self.ring_of = {stage: ring for ring in program.rings for stage in ring}
        self.rounds: dict[tuple[int, int], dict[int, float]] = {}
        """Times at which each stage of a ring was ready for its n-th pass, by the ring's first stage and n."""

    def advance(self, index: int) -> bool:
        """Runs a stage until it must wait; returns whether it progressed."""
        stage, progressed = self.stages[index], False
        while stage.rest:
            instruction = stage.rest[0]
            if not self._may_run(stage, index, instruction):
                break
            stage.rest.popleft()
            progressed = True
            if isinstance(instruction, Forward | Backward):
                visits = [instruction]
                if (other := self.beside.get(instruction.microbatch)) is not None:
                    stage.rest.popleft()
                    visits.append(type(instruction)(other))
                self._compute(stage, index, *visits)
            elif isinstance(instruction, Send):
                self._send(stage, index, instruction)
            elif isinstance(instruction, Step):
                args = {"jobs": {instruction.job: 0}, "step": instruction.step}
                self._take(stage, index, "step", stage.cost.step_s(index - stage.own.start), args)
        return progressed

    def _may_run(self, stage: _StageRun, index: int, instruction: Instruction) -> bool:
        """Advances the stage's clock to the inputs of an instruction; False if they do not exist yet."""
        match instruction:
            case Receive():
                return self._receive(stage, index, instruction)
            case Measure():
                return self._measure(stage, index, instruction)
            case Forward() | Backward() if index in self.ring_of:
                return self._meet(stage, index)
            case Step(job, step) if Measure(job, step) in self.measuring:
                norm_at = self.norms_at.get(Measure(job, step))
                stage.free_at = max(stage.free_at, norm_at or 0.0)
                return norm_at is not None
        return True

    def _meet(self, stage: _StageRun, index: int) -> bool:
        """Starts a pass of devices that share weights once all are ready."""
        ring = self.ring_of[index]
        ready = self.rounds.setdefault((ring[0], stage.num_passes), {})
        ready[index] = stage.free_at
        if len(ready) < len(ring):
            return False
        stage.free_at = max(ready.values())
        return True

    def _measure(self, stage: _StageRun, index: int, measure: Measure) -> bool:
        parts = self.measured.setdefault(measure, [])
        measuring = self.measuring[measure]
        if index != measuring[0]:
            parts.append(stage.free_at)
            return True
        if len(parts) < len(measuring) - 1:
            return False
        stage.free_at = self.norms_at[measure] = max([stage.free_at, *parts])
        return True

    def _compute(self, stage: _StageRun, index: int, *visits: Forward | Backward) -> None:
        number = index - stage.own.start
        is_forward = isinstance(visits[0], Forward)
        stage.num_passes += len(visits)
        numbers = [visit.microbatch for visit in visits if self.lengths[visit.microbatch]]
        if not numbers:
            return
        pass_s = stage.cost.forward_s if is_forward else stage.cost.backward_s
        added_s = sum(self.added_s[k] for k in numbers)
        seconds = sum(pass_s(self.lengths[k], number) for k in numbers) + added_s
        if self.pairs is not None and len(numbers) == 2:
            first, second = (self.lengths[k] for k in numbers)
            seconds *= self.pairs.share(first, second, number, is_forward=is_forward)
        held = sum(stage.cost.held_bytes(self.lengths[k], number) for k in numbers)
        if is_forward:
            stage.held += held
            stage.memory.append(MemoryPoint(index, stage.free_at, stage.held))
        start_s = stage.free_at
        for k, lane in zip(numbers, (COMPUTE, BESIDE), strict=False):
            args = {"microbatch": k, **self.notes[k]}
            if len(numbers) == 2:
                args["beside"] = sum(numbers) - k
            stage.free_at = start_s
            self._take(stage, index, "forward" if is_forward else "backward", seconds, args, lane)
        if not is_forward:
            stage.held -= held
            stage.memory.append(MemoryPoint(index, stage.free_at, stage.held))

    def _take(
        self, stage: _StageRun, index: int, name: str, seconds: float, args: Mapping[str, Any], lane: str = COMPUTE
    ) -> None:
        stage.spans.append(Span(name, stage.free_at, seconds, args, index, lane))
        stage.free_at += seconds

    def _send(self, stage: _StageRun, index: int, send: Send) -> None:
        parcel = (send.microbatch, send.to_stage, send.is_gradient)
        seconds = self._transfer_s(stage, send.microbatch)
        start = max(stage.free_at, stage.send_free_at)
        stage.send_free_at = self.arrivals[parcel] = start + seconds
        if seconds:
            args = {"microbatch": send.microbatch, "to": send.to_stage}
            stage.spans.append(Span("send", start, seconds, args, index, SEND))
            # Activations and gradients reach a stage from different neighbours, so each has a lane.
            lane = RECEIVE_GRADIENT if send.is_gradient else RECEIVE
            args = {"microbatch": send.microbatch, "from": index}
            self.stages[send.to_stage].spans.append(Span("receive", start, seconds, args, send.to_stage, lane))

    def _receive(self, stage: _StageRun, index: int, receive: Receive) -> bool:
        parcel = (receive.microbatch, index, receive.is_gradient)
        if parcel not in self.arrivals:
            return False
        stage.free_at = max(stage.free_at, self.arrivals[parcel])
        return True

    def _transfer_s(self, stage: _StageRun, microbatch: int) -> float:
        lengths = self.lengths[microbatch]
        return stage.cost.transfer_s(sum(lengths)) if lengths else 0.0


def simulate_turns(program: Program, cost: CostModel) -> Timeline:
    """The predicted timeline of one device's program, with the spans that the engine would record."""
    spans: list[Span] = []
    memory: list[MemoryPoint] = []
    now = 0.0
    for turn in program.turns:
        lengths = [s.length for s in turn.microbatch.segments]
        if lengths:
            seconds = cost.forward_s(lengths, 0) + cost.backward_s(lengths, 0)
            spans.append(Span("forward_backward", now, seconds, describe(turn.microbatch), lane=COMPUTE))
            memory.append(MemoryPoint(0, now, cost.held_bytes(lengths, 0)))
            now = spans[-1].end_s
            memory.append(MemoryPoint(0, now, 0))
        if turn.steps:
            jobs = {step.job: 0 for step in turn.steps}
            spans.append(Span("step", now, len(turn.steps) * cost.step_s(0), {"jobs": jobs}, lane=COMPUTE))
            now = spans[-1].end_s
    return Timeline(tuple(spans), 1, tuple(memory))


def describe(microbatch: Microbatch) -> dict[str, Any]:
    return {"tokens": microbatch.num_tokens, "jobs": microbatch.job_tokens}
