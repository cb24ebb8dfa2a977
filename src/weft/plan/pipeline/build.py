"""Builds the program of any schedule from one stream of microbatches.

A schedule defines the order of the stream, the flushes of the pipeline, and the order of each stage's passes. Transfers
and steps follow from these in the same way for all:

    schedule        stream                       flushed                          a stage's order
    gpipe           as given                     between global batches           all forwards, then all backwards
    1f1b            as given                     between global batches           lead S - s
    lorapp          rounds of one job's batches  never                            eager, at most S - s in flight
    multi-adapter   as given, spaced by the      never                            lead S - s
                    bubble lemma
    template        rounds, slowest bucket first between rounds                   eager, under the memory limit
    eager           as given                     never                            eager, under the memory limit

Every program passes `plan/check/`.
"""

from __future__ import annotations

import enum
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.errors import PlanError
from weft.plan.cost.learned import AdapterTimes
from weft.plan.cost.types import CostModel, LinearCost
from weft.plan.pack.planners import GREEDY
from weft.plan.pipeline.orders import Pipe, StageOrder, eager_orders, open_pipe, orders_by_lead
from weft.plan.pipeline.stream import BatchStream, StreamBatch, by_rounds, by_template, read_stream
from weft.plan.planner import Planner
from weft.plan.program import Backward, Forward, Instruction, Measure, Program, Receive, Send, Step
from weft.plan.types import JobQueue, Limits, Microbatch, lemma_distance, max_lead, whole_batches, with_empty_slots


class Schedule(enum.StrEnum):
    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    LORAPP = "lorapp"
    """mLoRA's: jobs fill each other's bubbles; each steps when its own batch has been backward."""
    MULTI_ADAPTER = "multi-adapter"
    """LoRAFusion's: microbatches of several jobs, distances kept by the bubble lemma, with no-ops where needed."""
    TEMPLATE = "template"
    """MuxTune's: slowest bucket first, as many microbatches in flight as memory allows."""
    EAGER = "eager"
    """The stream in the given order, without flushes or avoidable idle time."""


def build(
    schedule: Schedule,
    microbatches: Sequence[Microbatch],
    num_stages: int,
    *,
    cost: CostModel | None = None,
    memory_bytes: Sequence[int] | None = None,
    adapters: AdapterTimes | None = None,
    in_flight: Sequence[int] = (),
) -> Program:
    """The program of a schedule; `memory_bytes`: bytes of each stage for microbatches in flight; `in_flight`: most
    microbatches there, empty: as many as the schedule wants.

    `microbatches` hold whole global batches, each job's in order. Without a cost model a token counts 1 s and 1 byte.
    `adapters`: what a microbatch's jobs add to each pass, for eager schedules.
    """
    if not any(microbatch.segments for microbatch in microbatches):
        raise PlanError("there is no sample to run; give at least one microbatch with a segment.")
    model = LinearCost() if cost is None else cost
    if schedule is Schedule.TEMPLATE:
        given, rounds = by_template(microbatches, lambda m: model.forward_s([s.length for s in m.segments], 0))
        stream = read_stream(given)
        orders = eager_orders(stream, num_stages, model, memory_bytes, rounds, in_flight or None, adapters)
        return _assemble(stream, orders)
    stream = read_stream(_arranged(schedule, microbatches, num_stages))
    leads = [len(microbatches) if schedule is Schedule.GPIPE else num_stages - s for s in range(num_stages)]
    leads = [*map(min, leads, in_flight or leads)]
    if schedule in (Schedule.LORAPP, Schedule.EAGER):
        max_lead = leads if schedule is Schedule.LORAPP else in_flight or None
        orders = eager_orders(stream, num_stages, model, memory_bytes, max_lead=max_lead, adapters=adapters)
        return _assemble(stream, orders)
    flushes = stream.flushes if schedule in (Schedule.GPIPE, Schedule.ONE_F_ONE_B) else ()

    def held(k: int, stage: int) -> int:
        lengths = [s.length for s in stream.microbatches[k].segments]
        return model.held_bytes(lengths, stage) if lengths else 0

    return _assemble(stream, orders_by_lead(stream, leads, flushes, held, memory_bytes))


def _arranged(schedule: Schedule, microbatches: Sequence[Microbatch], num_stages: int) -> Sequence[Microbatch]:
    if schedule is Schedule.LORAPP:
        return by_rounds(microbatches)
    if schedule is Schedule.MULTI_ADAPTER:
        return with_empty_slots(microbatches, lemma_distance(num_stages))
    return microbatches


def _assemble(stream: BatchStream, orders: Sequence[StageOrder]) -> Program:
    """Adds transfers, measures and steps to the passes of every stage."""
    num_stages = len(orders)
    stages = tuple(
        tuple(with_transfers(stream, order, stage, num_stages, measures=num_stages > 1))
        for stage, order in enumerate(orders)
    )
    return Program(stream.microbatches, stages)


def with_transfers(
    stream: BatchStream, order: StageOrder, stage: int, num_stages: int, *, measures: bool
) -> list[Instruction]:
    """A stage's passes with their transfers, steps and, on several devices, measures."""
    growing = StageList(stage, num_stages, measures=measures)
    growing.know(stream)
    found = [i for visit in order for i in growing.visited(visit)]
    return [*found, *growing.due()]


class StageList:
    def __init__(self, stage: int, num_stages: int, *, measures: bool) -> None:
        self._stage, self._num_stages = stage, num_stages
        self._measures = measures
        self._batches_of: list[list[StreamBatch]] = []
        self._left: Counter[StreamBatch] = Counter()
        self.measured: dict[str, int] = {}
        """Measured step of each job, due before its next forward."""

    def know(self, stream: BatchStream) -> None:
        """Adds a stream, whose microbatches are numbered after the known ones."""
        self._batches_of += [sorted({(s.job, s.step) for s in m.segments}) for m in stream.microbatches]
        self._left.update({batch: len(ks) for batch, ks in stream.members.items()})

    def visited(self, visit: Forward | Backward) -> list[Instruction]:
        """A pass between its transfers, with the steps before it and the measures after it."""
        k, stages = visit.microbatch, range(self._num_stages)
        batches, is_gradient = self._batches_of[k], isinstance(visit, Backward)
        # A forward comes from the stage before and goes to the one after; a backward the other way round.
        towards = -1 if is_gradient else 1
        source, target = self._stage - towards, self._stage + towards
        result: list[Instruction] = []
        if source in stages:
            result.append(Receive(k, is_gradient, source))
        if not is_gradient:
            result += self.due([job for job, _ in batches if job in self.measured])
        result.append(visit)
        ended = []
        if is_gradient:
            self._left.subtract(batches)
            ended = [batch for batch in batches if self._left[batch] == 0]
        if self._measures:
            # Before the gradients are sent, so that their receiver has the measured part already.
            result.extend(Measure(job, step) for job, step in ended)
            self.measured.update(ended)
        if target in stages:
            result.append(Send(k, is_gradient, target))
        if not self._measures:
            result.extend(Step(job, step) for job, step in ended)
        return result

    def due(self, jobs: Sequence[str] | None = None) -> list[Step]:
        """Removes and returns the due steps of these jobs, or of all."""
        return [Step(job, self.measured.pop(job)) for job in (sorted(self.measured) if jobs is None else jobs)]


def renumbered(i: Instruction, numbers: Sequence[Sequence[int]], first: int) -> list[Instruction]:
    """An instruction of one replica with the program's numbers of microbatches and stages. A pair of microbatches side
    by side, which counts as one in the replica, gives two instructions."""
    match i:
        case Send():
            return [replace(i, microbatch=k, to_stage=first + i.to_stage) for k in numbers[i.microbatch]]
        case Receive():
            return [replace(i, microbatch=k, from_stage=first + i.from_stage) for k in numbers[i.microbatch]]
        case Forward() | Backward():
            return [replace(i, microbatch=k) for k in numbers[i.microbatch]]
    return [i]


@dataclass(frozen=True)
class PipelinePlanner(Planner):
    schedule: Schedule
    num_stages: int
    packer: Planner = GREEDY
    """Packs the microbatches, as on one device."""

    @property
    def quick(self) -> PipelinePlanner:
        quick = self.packer.quick
        return self if quick is self.packer else replace(self, packer=quick)

    def within(self, budget_s: float) -> PipelinePlanner:
        return replace(self, packer=self.packer.within(budget_s))

    def __call__(self, queues: Sequence[JobQueue], limits: Limits) -> Program:
        unlimited = replace(limits, max_microbatches=sys.maxsize)
        microbatches: list[Microbatch] = []
        for together in self._packed_together(whole_batches(queues, limits, self.num_stages)):
            microbatches += self.packer(together, unlimited).microbatches
        return build(self.schedule, microbatches, self.num_stages, in_flight=limits.in_flight)

    def open_pipes(self, limits: Limits) -> list[Pipe]:
        is_endless = self.schedule is Schedule.EAGER and self.num_stages > 1
        return [open_pipe(self.num_stages, max_lead=limits.lead(max_lead(self.num_stages)))] if is_endless else []

    def _packed_together(self, queues: list[JobQueue]) -> list[list[JobQueue]]:
        """Queues whose samples may share microbatches: all, or those of a job or of a round."""
        if self.schedule is Schedule.LORAPP:
            return [[queue] for queue in queues]
        if self.schedule is Schedule.TEMPLATE:
            most = max(len(queue.batches) for queue in queues)
            return [[replace(q, batches=q.batches[n : n + 1]) for q in queues] for n in range(most)]
        return [queues]
