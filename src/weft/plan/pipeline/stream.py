"""The order of global batches in a stream of microbatches.

A stream is microbatches in the order of their forwards. A global batch, (job, step), is open from its first microbatch
to its last; after the last one's backward the job's optimizer steps, and only then may the job's next global batch run
forward. All orders of a pipeline follow from three facts computed here in O(segments): which steps a microbatch
completes, which backward a forward waits for, and where a pipeline that ignores other jobs is flushed.

Also here: the stream orders of published schedules, in rounds of one global batch of every job.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from weft.errors import PlanError
from weft.plan.program import Instruction, Measure, Step
from weft.plan.types import Microbatch

StreamBatch = tuple[str, int]


@dataclass(frozen=True, slots=True)
class BatchStream:
    """A stream's global batches; forwards, and backwards, keep its order on every stage."""

    microbatches: tuple[Microbatch, ...]
    members: dict[StreamBatch, tuple[int, ...]]
    waits_for: tuple[int, ...]
    """Last earlier microbatch whose backward and steps a microbatch's forward needs, by microbatch; -1 for none."""

    @property
    def completes(self) -> dict[int, list[StreamBatch]]:
        ends: dict[int, list[StreamBatch]] = {}
        for batch in sorted(self.members):
            ends.setdefault(self.members[batch][-1], []).append(batch)
        return ends

    @property
    def flushes(self) -> tuple[int, ...]:
        """Positions where a classic schedule flushes the pipeline: no global batch is open, or a job's next one
        begins."""
        last = [-1] * len(self.microbatches)
        for ks in self.members.values():
            last[ks[0]] = max(last[ks[0]], ks[-1])
        start, reach, found = 0, -1, []
        for k, end in enumerate(last):
            if self.waits_for[k] >= start:
                start = k
                found.append(k)
            reach = max(reach, end)
            if reach <= k:
                start = k + 1
                found.append(k + 1)
        return tuple(dict.fromkeys(found))


def read_stream(microbatches: Sequence[Microbatch]) -> BatchStream:
    """Reads a stream; a PlanError if a job's batch begins before the one before is complete."""
    members: dict[StreamBatch, list[int]] = {}
    for k, microbatch in enumerate(microbatches):
        for batch in dict.fromkeys((s.job, s.step) for s in microbatch.segments):
            members.setdefault(batch, []).append(k)
    waits_for = [-1] * len(microbatches)
    before: dict[str, StreamBatch] = {}
    for batch in sorted(members):
        job, step = batch
        if job in before:
            previous = before[job]
            end, start = members[previous][-1], members[batch][0]
            if start <= end:
                raise PlanError(
                    f"step {step} of {job} has samples in microbatch {start}, and step {previous[1]} in {end}; "
                    "a global batch must be complete in the microbatches before the next one's first."
                )
            for k in members[batch]:
                waits_for[k] = max(waits_for[k], end)
        before[job] = batch
    frozen = {batch: tuple(ks) for batch, ks in members.items()}
    return BatchStream(tuple(microbatches), frozen, tuple(waits_for))


Bucket = TypeVar("Bucket", tuple[str, ...], tuple[int, ...])


def by_rounds(microbatches: Sequence[Microbatch]) -> tuple[Microbatch, ...]:
    """All jobs' first global batches, job after job, then all second ones: mLoRA's order. A microbatch holds one global
    batch's samples only."""
    queues: dict[str, dict[int, list[Microbatch]]] = {}
    for k, microbatch in enumerate(microbatches):
        owners = {(s.job, s.step) for s in microbatch.segments}
        if len(owners) != 1:
            raise PlanError(
                f"microbatch {k} holds samples of {len(owners)} global batches; "
                "this schedule takes microbatches of exactly one."
            )
        ((job, step),) = owners
        queues.setdefault(job, {}).setdefault(step, []).append(microbatch)
    per_job = [[batches[step] for step in sorted(batches)] for _, batches in sorted(queues.items())]
    rounds = itertools.zip_longest(*per_job, fillvalue=[])
    return tuple(microbatch for batches in rounds for batch in batches for microbatch in batch)


def by_template(
    microbatches: Sequence[Microbatch], latency_s: Callable[[Microbatch], float]
) -> tuple[tuple[Microbatch, ...], tuple[int, ...]]:
    """MuxTune's template: in each round the slowest bucket first, a bucket's microbatches together. A bucket is the
    microbatches of one round that are linked by shared jobs, in the given order, so that each job keeps its own.
    Returns the stream and the ends of its rounds."""
    rounds: dict[int, list[Microbatch]] = {}
    for microbatch, number in zip(microbatches, _round_numbers(microbatches), strict=True):
        rounds.setdefault(number, []).append(microbatch)
    stream: list[Microbatch] = []
    ends: list[int] = []
    for _, members in sorted(rounds.items()):
        buckets = _linked(members)
        slowest = {bucket: max(latency_s(m) for m in own) for bucket, own in buckets.items()}
        for bucket in slowest_first(slowest):
            stream.extend(buckets[bucket])
        ends.append(len(stream))
    return tuple(stream), tuple(ends)


def _linked(microbatches: Sequence[Microbatch]) -> dict[tuple[str, ...], list[Microbatch]]:
    """Microbatches in buckets without a common job, each in the given order."""
    groups: list[set[str]] = []
    for microbatch in microbatches:
        jobs = {*microbatch.job_tokens}
        touched = [group for group in groups if group & jobs]
        groups = [group for group in groups if not group & jobs] + [jobs.union(*touched)]
    return {tuple(sorted(group)): [m for m in microbatches if group & m.job_tokens.keys()] for group in groups}


def slowest_first(seconds: Mapping[Bucket, float]) -> list[Bucket]:
    """Buckets in a template's order, in which a shorter one fills the bubbles of a longer one; ties by name."""
    return sorted(seconds, key=lambda bucket: (-seconds[bucket], bucket))


def _round_numbers(microbatches: Sequence[Microbatch]) -> list[int]:
    """The round of each microbatch: the position of its global batches among those of their jobs, which must agree."""
    members = read_stream(microbatches).members
    numbers: dict[tuple[str, int], int] = {}
    for job, batches in itertools.groupby(sorted(members), key=lambda batch: batch[0]):
        numbers |= {(job, step): number for number, (_, step) in enumerate(batches)}
    result: list[int] = []
    for k, microbatch in enumerate(microbatches):
        found = {numbers[s.job, s.step] for s in microbatch.segments}
        if len(found) != 1:
            raise PlanError(
                f"microbatch {k} holds samples of {len(found)} rounds; this schedule takes microbatches of exactly one."
            )
        result.extend(found)
    return result


class SharedSteps:
    """Schedules steps of jobs that all replicas train, when they are due by the replicas' common clock."""

    def __init__(self, firsts: Sequence[int], pending: Sequence[list[Instruction]]) -> None:
        """`firsts`: the first stage of each replica; `pending`: the list of every stage, which is extended here."""
        self._firsts, self._pending = firsts, pending
        self._left: list[dict[str, deque[int]]] = [{} for _ in pending]
        self._newest: dict[str, int] = {}
        self._parts: Counter[StreamBatch] = Counter()
        self._roots: dict[StreamBatch, int] = {}
        """Replica that measures each global batch whose measure is not scheduled."""
        self._ends: dict[StreamBatch, float] = {}
        """Time at which each global batch has been backward everywhere, as far as known."""
        self._due: list[list[tuple[float, StreamBatch]]] = [[] for _ in firsts]
        """Measures that each replica may schedule, with their times."""

    def know(self, free: Mapping[str, Sequence[int]], streams: Sequence[BatchStream]) -> dict[StreamBatch, StreamBatch]:
        """Adds steps and each replica's part of them; returns the global batch before each one."""
        before = {}
        for job, steps in sorted(free.items()):
            for step in steps:
                batch = (job, step)
                holders = [replica for replica, stream in enumerate(streams) if batch in stream.members]
                self._roots[batch] = holders[0]
                self._ends.pop(batch, None)
                self._parts[batch] = sum(len(streams[replica].members[batch]) for replica in holders)
                if job in self._newest:
                    before[batch] = (job, self._newest[job])
                self._newest[job] = step
                for left in self._left:
                    left.setdefault(job, deque()).append(step)
        return before

    def is_root(self, replica: int, batch: StreamBatch) -> bool:
        return self._roots.get(batch) == replica

    def backward_done(self, batch: StreamBatch, end_s: float) -> float | None:
        """Records a first stage's backward; returns when the global batch has been backward everywhere, if it has."""
        self._parts[batch] -= 1
        self._ends[batch] = max(self._ends.get(batch, 0.0), end_s)
        if self._parts[batch]:
            return None
        heapq.heappush(self._due[self._roots[batch]], (self._ends[batch], batch))
        return self._ends[batch]

    def compute_steps_until(self, replica: int, now: float) -> None:
        """Schedules the measures that are due on the first stage of a replica."""
        due = self._due[replica]
        while due and due[0][0] <= now:
            self._measure(heapq.heappop(due)[1])

    def step_before(self, device: int, batch: StreamBatch) -> None:
        """Schedules all steps that a job's global batch needs on a stage."""
        job, step = batch
        left = self._left[device].get(job, deque())
        while left and left[0] < step:
            self._step(device, (job, left[0]))

    def step_until(self, device: int, now: float, batches: Mapping[StreamBatch, int], program: int) -> None:
        """Schedules steps on a stage that are due by now, of global batches in programs before this one."""
        for job, left in sorted(self._left[device].items()):
            while left and batches[job, left[0]] < program and self._is_stepped((job, left[0]), now):
                self._step(device, (job, left[0]))

    def end(self) -> None:
        for _, batch in sorted(due for own in self._due for due in own):
            self._measure(batch)
        for device, own in enumerate(self._left):
            for job, left in sorted(own.items()):
                for step in list(left):
                    self._step(device, (job, step))

    def _is_stepped(self, batch: StreamBatch, now: float) -> bool:
        return batch not in self._roots and self._ends[batch] <= now

    def _measure(self, batch: StreamBatch) -> None:
        if batch in self._roots:
            assert not self._parts.pop(batch), "a measured batch has been backward everywhere"
            device = self._firsts[self._roots.pop(batch)]
            self._pending[device].append(Measure(*batch))
            self._step(device, batch)

    def _step(self, device: int, batch: StreamBatch) -> None:
        job, step = batch
        self._measure(batch)
        left = self._left[device].get(job)
        if left and left[0] == step:
            left.popleft()
            self._pending[device].append(Step(job, step))
