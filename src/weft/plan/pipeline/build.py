"""Builds the program of any schedule from one stream of microbatches.

A schedule decides three things: the order of the stream, where the pipeline is flushed, and what each stage computes
when. Transfers and steps follow from those in the same way for all:

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
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from weft.errors import PlanError
from weft.plan.cost.learned import AdapterTimes
from weft.plan.cost.types import CostModel, LinearCost
from weft.plan.lemma import lemma_distance, with_empty_slots
from weft.plan.pipeline.eager import eager_orders
from weft.plan.pipeline.orders import StageOrder, orders_by_lead
from weft.plan.pipeline.stream import BatchStream, StreamBatch, by_rounds, by_template, read_stream
from weft.plan.program import Backward, Forward, Instruction, Measure, Program, Receive, Send, Step
from weft.plan.types import Microbatch


class Schedule(enum.StrEnum):
    """A way to run microbatches through a pipeline."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    LORAPP = "lorapp"
    """mLoRA's: jobs fill each other's bubbles; each steps when its own batch is back."""
    MULTI_ADAPTER = "multi-adapter"
    """LoRAFusion's: microbatches of several jobs, distances kept by the bubble lemma, with no-ops where needed."""
    TEMPLATE = "template"
    """MuxTune's: slowest bucket first, as many in flight as memory allows."""
    EAGER = "eager"
    """The stream as it is, no flush, nothing idle that need not be."""


def build(
    schedule: Schedule,
    microbatches: Sequence[Microbatch],
    num_stages: int,
    *,
    cost: CostModel | None = None,
    memory_bytes: Sequence[int] | None = None,
    keep_order: bool = False,
    adapters: AdapterTimes | None = None,
) -> Program:
    """The program of a schedule; `memory_bytes` is what each stage has for microbatches in flight.

    `microbatches` hold whole global batches, each job's in order. Without a cost model a token counts 1 s and 1 byte.
    `adapters`: what those of a microbatch's jobs add to the cost model's passes, for schedules that run ahead by it.
    Only a template takes microbatches of a global batch out of their order, and with `keep_order` it does not either.
    """
    _check(schedule, microbatches, num_stages, memory_bytes)
    model = LinearCost() if cost is None else cost
    if schedule is Schedule.TEMPLATE:
        given, rounds = by_template(
            microbatches, lambda m: model.forward_s([s.length for s in m.segments], 0), keep_order=keep_order
        )
        stream = read_stream(given)
        orders = eager_orders(stream, num_stages, model, memory_bytes, rounds, adapters=adapters)
        return _assemble(stream, orders)
    stream = read_stream(_arranged(schedule, microbatches, num_stages))
    leads = [len(microbatches) if schedule is Schedule.GPIPE else num_stages - s for s in range(num_stages)]
    if schedule in (Schedule.LORAPP, Schedule.EAGER):
        max_lead = leads if schedule is Schedule.LORAPP else None
        orders = eager_orders(stream, num_stages, model, memory_bytes, max_lead=max_lead, adapters=adapters)
        return _assemble(stream, orders)
    flushes = stream.flushes if schedule in (Schedule.GPIPE, Schedule.ONE_F_ONE_B) else ()

    def held(k: int, stage: int) -> int:
        lengths = [s.length for s in stream.microbatches[k].segments]
        return model.held_bytes(lengths, stage) if lengths else 0

    return _assemble(stream, orders_by_lead(stream, leads, flushes, held, memory_bytes))


def peak_bytes(program: Program, cost: CostModel) -> list[int]:
    """Most that each stage keeps at once between forwards and backwards."""
    peaks = []
    lengths = [[s.length for s in m.segments] for m in program.microbatches]
    for stage, instructions in enumerate(program.stages):
        held = peak = 0
        for i in instructions:
            if isinstance(i, Forward | Backward) and lengths[i.microbatch]:
                size = cost.held_bytes(lengths[i.microbatch], stage)
                held += size if isinstance(i, Forward) else -size
                peak = max(peak, held)
        peaks.append(peak)
    return peaks


def _check(
    schedule: Schedule,
    microbatches: Sequence[Microbatch],
    num_stages: int,
    memory_bytes: Sequence[int] | None,
) -> None:
    if num_stages < 1:
        raise PlanError(f"{num_stages} stages make no pipeline; use at least one.")
    if not any(microbatch.segments for microbatch in microbatches):
        raise PlanError("there is no sample to run; give at least one microbatch with a segment.")
    if memory_bytes is None:
        return
    if len(memory_bytes) != num_stages:
        raise PlanError(f"memory is given for {len(memory_bytes)} stages of {num_stages}; name it for each.")
    for stage, limit in enumerate(memory_bytes):
        if limit <= 0:
            raise PlanError(f"stage {stage} has {limit} bytes for microbatches in flight; it needs room for one.")


def _arranged(schedule: Schedule, microbatches: Sequence[Microbatch], num_stages: int) -> Sequence[Microbatch]:
    if schedule is Schedule.LORAPP:
        return by_rounds(microbatches)
    if schedule is Schedule.MULTI_ADAPTER:
        return with_empty_slots(microbatches, lemma_distance(num_stages))
    return microbatches


def _assemble(stream: BatchStream, orders: Sequence[StageOrder]) -> Program:
    """Puts every computation between its transfers, and steps where they are due."""
    num_stages = len(orders)
    stages = tuple(
        tuple(with_transfers(stream, order, stage, num_stages, measures=num_stages > 1))
        for stage, order in enumerate(orders)
    )
    return Program(stream.microbatches, stages)


def with_transfers(
    stream: BatchStream, order: StageOrder, stage: int, num_stages: int, *, measures: bool
) -> list[Instruction]:
    """A stage's list with the transfers, measures (where several devices train) and steps of what it computes."""
    growing = StageList(stage, num_stages, measures=measures)
    growing.know(stream)
    found = [i for visit in order for i in growing.visited(visit)]
    return [*found, *growing.due()]


class StageList:
    """One stage's list while it is made: what belongs to the passes that it is told, one after another."""

    def __init__(self, stage: int, num_stages: int, *, measures: bool) -> None:
        self._stage, self._num_stages = stage, num_stages
        self._measures = measures
        self._batches_of: list[list[StreamBatch]] = []
        self._left: Counter[StreamBatch] = Counter()
        """Backwards of each global batch."""
        self.measured: dict[str, int] = {}
        """By job, the step that is due before its next forward."""

    def know(self, stream: BatchStream) -> None:
        """Learns what goes through the pipeline next; its microbatches are numbered from those known so far."""
        self._batches_of += [sorted({(s.job, s.step) for s in m.segments}) for m in stream.microbatches]
        self._left.update({batch: len(places) for batch, places in stream.members.items()})

    def visited(self, visit: Forward | Backward) -> list[Instruction]:
        """A pass between its transfers, with the steps before it and the measures behind it."""
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
            # Before the gradients go on, so that whoever gets them has the part that belongs to them already.
            result.extend(Measure(job, step) for job, step in ended)
            self.measured.update(ended)
        if target in stages:
            result.append(Send(k, is_gradient, target))
        if not self._measures:
            result.extend(Step(job, step) for job, step in ended)
        return result

    def due(self, jobs: Sequence[str] | None = None) -> list[Step]:
        """The steps of these jobs that are due, or of all; they are taken here."""
        return [Step(job, self.measured.pop(job)) for job in (sorted(self.measured) if jobs is None else jobs)]


def renumbered(i: Instruction, numbers: Sequence[Sequence[int]], first: int) -> list[Instruction]:
    """An instruction of one replica in the numbers of all: of its microbatches, and from its `first` stage on.

    A microbatch that is two of all, which run side by side, has one for each.
    """
    match i:
        case Send():
            return [replace(i, microbatch=k, to_stage=first + i.to_stage) for k in numbers[i.microbatch]]
        case Receive():
            return [replace(i, microbatch=k, from_stage=first + i.from_stage) for k in numbers[i.microbatch]]
        case Forward() | Backward():
            return [replace(i, microbatch=k) for k in numbers[i.microbatch]]
    return [i]
