"""Plans programs for several whole replicas under one engine.

Samples are dealt out (`deal.py`) and packed replica by replica, as for one; where jobs are spread, round by round, a
round being one global batch of every job: a microbatch of two rounds could wait for another replica that waits for it.
Then all replicas are run ahead side by side on their cost models: what each stage does when, follows from that, and so
do the judges' measures and all steps of jobs that several replicas train. They stand where the common clock has them
due, so that no list waits for another that waits for it. Replicas that share frozen weights are aligned first
(`align.py`) and then run as one, whose n-th microbatch is that of each. O(samples · replicas + instructions).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from weft.plan.cost.types import CostModel
from weft.plan.homes import PlannedReplicas
from weft.plan.layout import copies
from weft.plan.pipeline.build import renumbered, with_transfers
from weft.plan.pipeline.eager import Clock, Pass, Pipe, clock_of, play_all
from weft.plan.pipeline.planner import whole_batches
from weft.plan.pipeline.stream import BatchStream, StreamBatch, read_stream
from weft.plan.program import Backward, Forward, Instruction, Measure, Program, Step
from weft.plan.spread.align import align
from weft.plan.spread.deal import deal
from weft.plan.types import JobQueue, Limits, Microbatch


@dataclass(frozen=True)
class HomeLoad:
    """What is known of a job that has one home."""

    step_tokens: float
    """Of a global batch, on average."""
    longest: int
    """Tokens of its longest sample, or of the longest group that shares a microbatch."""


@dataclass(frozen=True)
class SpreadPlanner:
    """A planner for replicas of so many stages each."""

    replica_sizes: tuple[int, ...]
    costs: tuple[CostModel, ...]
    """Of each replica."""
    planned: PlannedReplicas | None = None
    """What the plan says of the replicas that they were chosen by; None: there was none."""
    shards: tuple[int, ...] = ()
    """How many replicas, one behind the other, share each copy of the frozen weights; empty: none do."""

    def __call__(self, queues: Sequence[JobQueue], limits: Limits) -> Program:
        """The next program: whole global batches, at least one of every job."""
        whole = whole_batches(queues, limits, sum(self.replica_sizes))
        free = {
            queue.job: [batch.step for batch in queue.batches if batch.lengths] for queue in whole if queue.home is None
        }
        speeds, streams = self.speeds(limits.capacity), [list[Microbatch]() for _ in self.replica_sizes]
        holds = self.holds(limits.capacity)
        for together in _rounds(whole) if free else [whole]:
            for stream, dealt, most in zip(streams, deal(together, speeds, holds), holds, strict=True):
                stream += dealt.packed(replace(limits, capacity=max(most, dealt.longest)))
        return self.assemble(streams, free)

    def assemble(self, streams: Sequence[Sequence[Microbatch]], free: Mapping[str, Sequence[int]]) -> Program:
        """The program of what each replica is to run; `free`: the steps of the jobs that all replicas train."""
        return _assembled(streams, self.replica_sizes, self.costs, free, self.shards)

    def home_seconds(self, jobs: Mapping[str, HomeLoad], capacity: int) -> dict[str, tuple[float, ...]]:
        """Of a global batch of each job that has one home, by replica: as planned, or else by its tokens."""
        known = {} if self.planned is None else self.planned.home_s
        speeds, holds = self.speeds(capacity), self.holds(capacity)
        largest = max(holds)
        seconds = {job: known[job] for job in known if job in jobs}
        for job, load in jobs.items():
            fits = [load.longest <= most or most == largest for most in holds]
            own = (load.step_tokens / speed if fit else math.inf for speed, fit in zip(speeds, fits, strict=True))
            seconds.setdefault(job, tuple(own))
        return seconds

    def holds(self, capacity: int) -> list[int]:
        """Tokens of the largest microbatch of each replica."""
        planned = self.planned
        return [capacity if planned is None else min(capacity, planned.holds[k]) for k, _ in enumerate(self.costs)]

    def speeds(self, capacity: int) -> list[float]:
        """Tokens that each replica is taken to run in a second, its stages full."""
        found = []
        for size, cost in zip(self.replica_sizes, self.costs, strict=True):
            stages = range(size)
            slowest = max(cost.forward_s([capacity], s) + cost.backward_s([capacity], s) for s in stages)
            found.append(capacity / slowest)
        return found


def _rounds(queues: Sequence[JobQueue]) -> list[list[JobQueue]]:
    """The first global batches of all jobs, the second ones, and so on."""
    most = max(len(queue.batches) for queue in queues)
    return [[replace(q, batches=q.batches[n : n + 1]) for q in queues if n < len(q.batches)] for n in range(most)]


def _assembled(
    given: Sequence[Sequence[Microbatch]],
    replica_sizes: Sequence[int],
    costs: Sequence[CostModel],
    free: Mapping[str, Sequence[int]],
    shards: Sequence[int] = (),
) -> Program:
    """The program of what each replica is to run; `free`: the steps of the jobs that all replicas train."""
    before = {(job, step): (job, earlier) for job, own in free.items() for earlier, step in itertools.pairwise(own)}

    def needs(microbatch: Microbatch) -> list[StreamBatch]:
        return [before[batch] for batch in _shared(microbatch, free) if batch in before]

    aligned = align(given, shards, lambda microbatch: _shared(microbatch, free), needs) if shards else given
    streams = [read_stream(stream) for stream in aligned]
    owners = copies(len(streams), shards)
    pipes = [
        _joint([_pipe(streams[k], replica_sizes[k], costs[k], free.keys(), before) for k in own]) for own in owners
    ]
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
        for place, passes in enumerate(stages):
            visits = [Backward(p.clock) if p.is_backward else Forward(p.clock) for p in passes]
            own = with_transfers(stream, visits, place, len(stages), measures=True)
            judged = [batch for batch, (_, judge) in due.items() if place == 0 and judge == replica]
            own = _with_steps(own, passes, stream, due, free, judged)
            lists.append(tuple(each for i in own for each in renumbered(i, numbers[replica], first)))
    return Program(microbatches, tuple(lists), replica_sizes=tuple(replica_sizes), shards=tuple(shards))


def _joint(pipes: Sequence[Pipe]) -> Pipe:
    """What goes through stages that run in step: of each replica its n-th microbatch."""
    first = pipes[0]
    if len(pipes) == 1:
        return first
    return replace(
        first,
        clocks=[_slowest(together) for together in zip(*(pipe.clocks for pipe in pipes), strict=True)],
        waits_for=[max(together) for together in zip(*(pipe.waits_for for pipe in pipes), strict=True)],
        shared=[list(itertools.chain(*together)) for together in zip(*(pipe.shared for pipe in pipes), strict=True)],
        needs=[list(itertools.chain(*together)) for together in zip(*(pipe.needs for pipe in pipes), strict=True)],
    )


def _slowest(clocks: Sequence[Clock]) -> Clock:
    """What goes through the stages at the same time."""
    return Clock(
        tuple(map(max, *(clock.forward_s for clock in clocks))),
        tuple(map(max, *(clock.backward_s for clock in clocks))),
        tuple(map(max, *(clock.held_bytes for clock in clocks))),
        max(clock.transfer_s for clock in clocks),
        tuple(map(max, *(clock.step_s for clock in clocks))),
    )


def _pipe(
    stream: BatchStream,
    num_stages: int,
    cost: CostModel,
    free: Collection[str],
    before: Mapping[StreamBatch, StreamBatch],
) -> Pipe:
    """What a replica runs, and for which global batches it waits for others."""
    num_steps = {k: len(batches) for k, batches in stream.completes.items()}
    shared = [_shared(m, free) for m in stream.microbatches]
    return Pipe(
        [clock_of(m, num_steps.get(k, 0), num_stages, cost) for k, m in enumerate(stream.microbatches)],
        num_stages,
        stream.waits_for,
        max_lead=max_lead(num_stages),
        shared=shared,
        needs=[[before[batch] for batch in own if batch in before] for own in shared],
    )


def max_lead(num_stages: int) -> list[int]:
    """Most microbatches that each stage of a replica has in flight."""
    return [2 * num_stages] * num_stages


def _shared(microbatch: Microbatch, free: Collection[str]) -> list[StreamBatch]:
    return sorted({(s.job, s.step) for s in microbatch.segments if s.job in free})


def _due(
    streams: Sequence[BatchStream], played: Sequence[Sequence[Sequence[Pass]]], free: Mapping[str, Sequence[int]]
) -> dict[StreamBatch, tuple[float, int]]:
    """When each global batch that is shared has been backward everywhere, and the first replica that has some of it."""
    due: dict[StreamBatch, tuple[float, int]] = {}
    for replica, (stream, stages) in enumerate(zip(streams, played, strict=True)):
        for one in stages[0]:
            for batch in _shared(stream.microbatches[one.clock], free) if one.is_backward else ():
                end, judge = due.get(batch, (0.0, replica))
                due[batch] = (max(end, one.end_s), judge)
    return dict(sorted(due.items(), key=lambda item: (item[1][0], item[0])))


def _with_steps(
    given: Sequence[Instruction],
    passes: Sequence[Pass],
    stream: BatchStream,
    due: Mapping[StreamBatch, tuple[float, int]],
    free: Mapping[str, Sequence[int]],
    judged: Sequence[StreamBatch],
) -> list[Instruction]:
    """A stage's list with the steps of shared jobs in place: before their next forward, or when it has judged them."""
    result: list[Instruction] = []
    left = {job: list(own) for job, own in free.items()}

    def step_until(job: str, step: int) -> None:
        while left[job] and left[job][0] < step:
            result.append(Step(job, left[job].pop(0)))

    judging, running = list(judged), iter(passes)
    for i in given:
        if isinstance(i, Step) and i.job in free:
            continue
        if isinstance(i, Measure) and (i.job, i.step) in judged:
            continue
        if isinstance(i, Forward | Backward):
            now = next(running).start_s
            while judging and due[judging[0]][0] <= now:
                job, step = judging.pop(0)
                step_until(job, step)
                result.append(Measure(job, step))
                step_until(job, step + 1)
            if isinstance(i, Forward):
                for job, step in _shared(stream.microbatches[i.microbatch], free):
                    step_until(job, step)
        result.append(i)
    for job, step in due:
        if (job, step) in judging:
            step_until(job, step)
            result.append(Measure(job, step))
        step_until(job, step + 1)
    return result
