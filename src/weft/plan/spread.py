"""Programs for several whole replicas: assigns jobs to homes, and the samples of other jobs to replicas."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from weft.plan.cost.learned import PASSES, AdapterTimes, PassCosts
from weft.plan.cost.types import CostModel
from weft.plan.deploy.deal import PricedReplica, deal
from weft.plan.layout import DispatchRule, ReplicaLayout, copies
from weft.plan.level import PlannedReplicas
from weft.plan.pipeline.build import renumbered, with_transfers
from weft.plan.pipeline.orders import Clock, Pass, Pipe, clock_of, open_pipe, play_all
from weft.plan.pipeline.stream import BatchStream, StreamBatch, read_stream
from weft.plan.planner import HomeLoad, MeasuredPasses, Planner, PreviousMicrobatches
from weft.plan.program import Backward, Forward, Instruction, Measure, Program, Step
from weft.plan.types import JobQueue, Limits, Microbatch, max_lead, whole_batches


@dataclass(frozen=True)
class SpreadPlanner(Planner):
    replica_sizes: tuple[int, ...]
    costs: tuple[CostModel, ...]
    planned: PlannedReplicas | None = None
    shards: tuple[int, ...] = ()
    """Number of consecutive replicas that share each copy of the frozen weights; empty: none do."""
    dispatch: DispatchRule = DispatchRule.BALANCED
    tensor: tuple[int, ...] = ()
    """Devices that share every layer, of each replica; empty: none do."""
    measured: tuple[tuple[CostModel, AdapterTimes], ...] | None = None
    """Measured costs of passes on each replica; None: those of its cost model."""
    num_measured: int = 0

    def __call__(self, queues: Sequence[JobQueue], limits: Limits) -> Program:
        """The next program: whole global batches, at least one of every job."""
        whole = whole_batches(queues, limits, sum(self.replica_sizes))
        free = {
            queue.job: [batch.step for batch in queue.batches if batch.lengths] for queue in whole if queue.home is None
        }
        streams, holds = [list[Microbatch]() for _ in self.replica_sizes], self.holds(limits.capacity)
        replicas = self.priced(holds, whole)
        for together in _rounds(whole) if free else [whole]:
            for stream, dealt, most in zip(streams, deal(together, replicas, self.dispatch), holds, strict=True):
                stream += dealt.packed(replace(limits, capacity=max(most, dealt.longest)))
        return self.assemble(streams, free, limits)

    @property
    def stages(self) -> list[range]:
        """The stages of each replica."""
        ends = itertools.accumulate(self.replica_sizes)
        return [range(end - size, end) for size, end in zip(self.replica_sizes, ends, strict=True)]

    def leads(self, limits: Limits) -> list[list[int]]:
        """Maximum number of microbatches in flight on the stages of each replica."""
        return [limits.of_stages(stages).lead(max_lead(len(stages))) for stages in self.stages]

    def assemble(
        self, streams: Sequence[Sequence[Microbatch]], free: Mapping[str, Sequence[int]], limits: Limits
    ) -> Program:
        """The program of the replicas' streams; `free`: steps of the jobs that all replicas train."""
        return _assembled(streams, self.leads(limits), self.pass_costs, free, self.shards)

    def informed(self, measured: MeasuredPasses, previous: PreviousMicrobatches) -> SpreadPlanner:
        stages, learned, first = measured.stages, list[tuple[CostModel, AdapterTimes]](), 0
        for size, cost in zip(self.replica_sizes, self.costs, strict=True):
            replica = stages.learn(size, cost, measured.ranks, first)
            if replica is None:
                return self
            learned.append(replica)
            first += size
        return replace(self, measured=tuple(learned), num_measured=stages.num_seen)

    def priced(self, holds: Sequence[int], queues: Sequence[JobQueue]) -> list[PricedReplica]:
        """The replicas with their prices for dispatch; alike ones are one object. Only a balanced dispatch follows
        measurements, because by length alike replicas must cost the same. No dispatch does where degrees of tensor
        parallelism differ: there the replica of a sample decides its last bits, and must not depend on a clock."""
        tokens = {queue.job: sum(sum(batch.lengths) for batch in queue.batches) for queue in queues}
        degrees = self.tensor or (1,) * len(self.replica_sizes)
        is_fixed = self.dispatch is not DispatchRule.BALANCED or len({*degrees}) > 1
        known: dict[tuple[int, int, int], PricedReplica] = {}
        found = []
        for size, degree, table, (cost, adapters), most in zip(
            self.replica_sizes, degrees, self.costs, self.pass_costs, holds, strict=True
        ):
            layout = ReplicaLayout(degree, stages=size)
            if adapters is None or is_fixed:
                found.append(known.setdefault((size, id(table), most), PricedReplica(layout, most, table)))
                continue
            fixed_s = len(PASSES) * adapters.job_s * len(tokens)
            token_s = (len(PASSES) * adapters.microbatch_s(tokens) - fixed_s) / max(1, sum(tokens.values()))
            found.append(PricedReplica(layout, most, cost, adapter_token_s=token_s, adapters_s=fixed_s))
        return found

    def home_seconds(self, jobs: Mapping[str, HomeLoad], capacity: int) -> dict[str, tuple[float, ...]]:
        """Seconds of a global batch of each job with a home, by replica: as planned, or else by its tokens."""
        known = {} if self.planned is None else self.planned.home_s
        speeds, holds = self.speeds(capacity), self.holds(capacity)
        largest = max(holds)
        seconds = {job: known[job] for job in known if job in jobs}
        for job, load in jobs.items():
            fits = [load.longest <= most or most == largest for most in holds]
            own = (load.step_tokens / speed if fit else math.inf for speed, fit in zip(speeds, fits, strict=True))
            seconds.setdefault(job, tuple(own))
        return seconds

    def open_pipes(self, limits: Limits) -> list[Pipe]:
        if len(self.replica_sizes) == 1 or self.shards:
            return []
        return [open_pipe(len(own), max_lead=own) for own in self.leads(limits)]

    @property
    def pass_costs(self) -> Sequence[PassCosts]:
        return self.measured or [(cost, None) for cost in self.costs]

    def holds(self, capacity: int) -> list[int]:
        planned = self.planned
        return [capacity if planned is None else min(capacity, planned.holds[k]) for k, _ in enumerate(self.costs)]

    def speeds(self, capacity: int) -> list[float]:
        found = []
        for size, cost in zip(self.replica_sizes, self.costs, strict=True):
            stages = range(size)
            slowest = max(cost.forward_s([capacity], s) + cost.backward_s([capacity], s) for s in stages)
            found.append(capacity / slowest)
        return found


def _rounds(queues: Sequence[JobQueue]) -> list[list[JobQueue]]:
    most = max(len(queue.batches) for queue in queues)
    return [[replace(q, batches=q.batches[n : n + 1]) for q in queues if n < len(q.batches)] for n in range(most)]


def _assembled(
    given: Sequence[Sequence[Microbatch]],
    leads: Sequence[Sequence[int]],
    costs: Sequence[PassCosts],
    free: Mapping[str, Sequence[int]],
    shards: Sequence[int] = (),
) -> Program:
    before = {(job, step): (job, earlier) for job, own in free.items() for earlier, step in itertools.pairwise(own)}

    def needs(microbatch: Microbatch) -> list[StreamBatch]:
        return [before[batch] for batch in _shared(microbatch, free) if batch in before]

    aligned = align(given, shards, lambda microbatch: _shared(microbatch, free), needs) if shards else given
    streams = [read_stream(stream) for stream in aligned]
    owners = copies(len(streams), shards)
    pipes = [_joint([_pipe(streams[k], leads[k], costs[k], free.keys(), before) for k in own]) for own in owners]
    played = [stages for own, stages in zip(owners, play_all(pipes), strict=True) for _ in own]
    due = _due(streams, played, free)
    order = sorted(
        (one.start_s, replica, one.clock)
        for replica, stages in enumerate(played)
        for one in stages[0]
        if not one.is_backward
    )
    numbers = [[[0]] * len(stream.microbatches) for stream in streams]
    for number, (_, replica, k) in enumerate(order):
        numbers[replica][k] = [number]
    microbatches = tuple(streams[replica].microbatches[k] for _, replica, k in order)
    lists: list[tuple[Instruction, ...]] = []
    for replica, (stream, stages) in enumerate(zip(streams, played, strict=True)):
        first = len(lists)
        for index, passes in enumerate(stages):
            visits = [Backward(p.clock) if p.is_backward else Forward(p.clock) for p in passes]
            own = with_transfers(stream, visits, index, len(stages), measures=True)
            rooted = [batch for batch, (_, root) in due.items() if index == 0 and root == replica]
            own = _with_steps(own, passes, stream, due, free, rooted)
            lists.append(tuple(each for i in own for each in renumbered(i, numbers[replica], first)))
    return Program(microbatches, tuple(lists), replica_sizes=tuple(map(len, leads)), shards=tuple(shards))


def _joint(pipes: Sequence[Pipe]) -> Pipe:
    """One pipe for stages that run in step, with the n-th microbatch of each replica."""
    first = pipes[0]
    if len(pipes) == 1:
        return first
    return replace(
        first,
        clocks=[_slowest(together) for together in zip(*(pipe.clocks for pipe in pipes), strict=True)],
        max_lead=[*map(min, *(pipe.max_lead or () for pipe in pipes))],
        waits_for=[max(together) for together in zip(*(pipe.waits_for for pipe in pipes), strict=True)],
        shared=[list(itertools.chain(*together)) for together in zip(*(pipe.shared for pipe in pipes), strict=True)],
        needs=[list(itertools.chain(*together)) for together in zip(*(pipe.needs for pipe in pipes), strict=True)],
    )


def _slowest(clocks: Sequence[Clock]) -> Clock:
    return Clock(
        tuple(map(max, *(clock.forward_s for clock in clocks))),
        tuple(map(max, *(clock.backward_s for clock in clocks))),
        tuple(map(max, *(clock.held_bytes for clock in clocks))),
        max(clock.transfer_s for clock in clocks),
        tuple(map(max, *(clock.step_s for clock in clocks))),
    )


def _pipe(
    stream: BatchStream,
    leads: Sequence[int],
    costs: PassCosts,
    free: Collection[str],
    before: Mapping[StreamBatch, StreamBatch],
) -> Pipe:
    """The microbatches of a replica, and the global batches for which it waits for others."""
    num_stages = len(leads)
    num_steps = {k: len(batches) for k, batches in stream.completes.items()}
    shared = [_shared(m, free) for m in stream.microbatches]
    return Pipe(
        [clock_of(m, num_steps.get(k, 0), num_stages, *costs) for k, m in enumerate(stream.microbatches)],
        num_stages,
        stream.waits_for,
        max_lead=leads,
        shared=shared,
        needs=[[before[batch] for batch in own if batch in before] for own in shared],
    )


def _shared(microbatch: Microbatch, free: Collection[str]) -> list[StreamBatch]:
    return sorted({(s.job, s.step) for s in microbatch.segments if s.job in free})


def _due(
    streams: Sequence[BatchStream], played: Sequence[Sequence[Sequence[Pass]]], free: Mapping[str, Sequence[int]]
) -> dict[StreamBatch, tuple[float, int]]:
    """Time at which each shared global batch has been backward everywhere, and the first replica that has part of
    it."""
    due: dict[StreamBatch, tuple[float, int]] = {}
    for replica, (stream, stages) in enumerate(zip(streams, played, strict=True)):
        for one in stages[0]:
            for batch in _shared(stream.microbatches[one.clock], free) if one.is_backward else ():
                end, root = due.get(batch, (0.0, replica))
                due[batch] = (max(end, one.end_s), root)
    return dict(sorted(due.items(), key=lambda item: (item[1][0], item[0])))


def _with_steps(
    given: Sequence[Instruction],
    passes: Sequence[Pass],
    stream: BatchStream,
    due: Mapping[StreamBatch, tuple[float, int]],
    free: Mapping[str, Sequence[int]],
    rooted: Sequence[StreamBatch],
) -> list[Instruction]:
    """A stage's list with the steps of shared jobs: before their next forward, or once their norm is known here."""
    result: list[Instruction] = []
    left = {job: list(own) for job, own in free.items()}

    def step_until(job: str, step: int) -> None:
        while left[job] and left[job][0] < step:
            result.append(Step(job, left[job].pop(0)))

    measuring, running = list(rooted), iter(passes)
    for i in given:
        if isinstance(i, Step) and i.job in free:
            continue
        if isinstance(i, Measure) and (i.job, i.step) in rooted:
            continue
        if isinstance(i, Forward | Backward):
            now = next(running).start_s
            while measuring and due[measuring[0]][0] <= now:
                job, step = measuring.pop(0)
                step_until(job, step)
                result.append(Measure(job, step))
                step_until(job, step + 1)
            if isinstance(i, Forward):
                for job, step in _shared(stream.microbatches[i.microbatch], free):
                    step_until(job, step)
        result.append(i)
    for job, step in due:
        if (job, step) in measuring:
            step_until(job, step)
            result.append(Measure(job, step))
        step_until(job, step + 1)
    return result


Batches = Callable[[Microbatch], Collection[StreamBatch]]


def align(
    streams: Sequence[Sequence[Microbatch]], shards: Sequence[int], shared: Batches, needs: Batches
) -> list[list[Microbatch]]:
    """The streams, padded with empty microbatches so that those of each copy of the frozen weights have equal length.
    `shared`: the global batches of a microbatch that have samples on other replicas; `needs`: those that must have been
    backward everywhere before."""
    left = Counter(batch for stream in streams for microbatch in stream for batch in shared(microbatch))
    found: list[list[Microbatch]] = [[] for _ in streams]
    positions = [0] * len(streams)
    owners = copies(len(streams), shards)
    while True:
        ready = [
            at < len(stream) and not any(left[batch] for batch in needs(stream[at]))
            for stream, at in zip(streams, positions, strict=True)
        ]
        if not any(ready):
            break
        ran: list[Microbatch] = []
        for own in owners:
            for replica in own if any(ready[replica] for replica in own) else ():
                found[replica].append(streams[replica][positions[replica]] if ready[replica] else Microbatch(()))
                positions[replica] += ready[replica]
                ran.append(found[replica][-1])
        for microbatch in ran:
            left.subtract(shared(microbatch))
    assert positions == [len(stream) for stream in streams], "global batches come in the same order everywhere"
    return found
