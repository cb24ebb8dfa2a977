"""Where the steps of jobs that all replicas train stand in lists that go on.

Whoever had samples of a global batch measures behind its last backward. The first of these replicas judges: its first
stage measures once all others have been told to, and every stage of every replica steps behind that. So whatever stages
are told waits only for what they were told before, in one order over all of them, and none waits for ever: the first
thing of that order that has not been done can be.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Mapping, Sequence

from weft.plan.pipeline.stream import BatchStream, StreamBatch
from weft.plan.program import Instruction, Measure, Step


class SharedSteps:
    """Tells stages to judge and to take these steps, each when it is due by the common clock of all replicas."""

    def __init__(self, firsts: Sequence[int], told: Sequence[list[Instruction]]) -> None:
        """`firsts`: the first stage of each replica; `told`: what every stage is told, which is added to here."""
        self._firsts, self._told = firsts, told
        self._left: list[dict[str, deque[int]]] = [{} for _ in told]
        """By job, the steps that each stage has not been told to take."""
        self._newest: dict[str, int] = {}
        self._parts: Counter[StreamBatch] = Counter()
        """Backwards of first stages that are missing of each global batch."""
        self._judges: dict[StreamBatch, int] = {}
        """The replicas that judge what nobody has been told to judge."""
        self._ends: dict[StreamBatch, float] = {}
        """When each global batch has been backward everywhere, as far as that is known."""
        self._due: list[list[tuple[float, StreamBatch]]] = [[] for _ in firsts]
        """What each replica may judge."""

    def know(self, free: Mapping[str, Sequence[int]], streams: Sequence[BatchStream]) -> dict[StreamBatch, StreamBatch]:
        """Learns of further steps and of what each replica has of them; by global batch, the one before it."""
        before = {}
        for job, steps in sorted(free.items()):
            for step in steps:
                batch = (job, step)
                holders = [replica for replica, stream in enumerate(streams) if batch in stream.members]
                self._judges[batch] = holders[0]
                self._ends.pop(batch, None)
                self._parts[batch] = sum(len(streams[replica].members[batch]) for replica in holders)
                if job in self._newest:
                    before[batch] = (job, self._newest[job])
                self._newest[job] = step
                for left in self._left:
                    left.setdefault(job, deque()).append(step)
        return before

    def is_root(self, replica: int, batch: StreamBatch) -> bool:
        """Whether a replica judges a global batch that nobody has been told to judge."""
        return self._judges.get(batch) == replica

    def backward_done(self, batch: StreamBatch, end_s: float) -> float | None:
        """A first stage has gone back through a part; when all of it has been backward everywhere, if it has."""
        self._parts[batch] -= 1
        self._ends[batch] = max(self._ends.get(batch, 0.0), end_s)
        if self._parts[batch]:
            return None
        heapq.heappush(self._due[self._judges[batch]], (self._ends[batch], batch))
        return self._ends[batch]

    def compute_steps_until(self, replica: int, now: float) -> None:
        """Has the first stage of a replica judge what it can by now."""
        due = self._due[replica]
        while due and due[0][0] <= now:
            self._judge(heapq.heappop(due)[1])

    def step_before(self, device: int, batch: StreamBatch) -> None:
        """Has a stage take all steps that a job's global batch needs."""
        job, step = batch
        left = self._left[device].get(job, deque())
        while left and left[0] < step:
            self._step(device, (job, left[0]))

    def step_until(self, device: int, now: float, batches: Mapping[StreamBatch, int], program: int) -> None:
        """Has a stage take the steps, judged by now, of those `batches` that belong to programs before this one."""
        for job, left in sorted(self._left[device].items()):
            while left and batches[job, left[0]] < program and self._is_stepped((job, left[0]), now):
                self._step(device, (job, left[0]))

    def end(self) -> None:
        """Has all judged and stepped."""
        for _, batch in sorted(due for own in self._due for due in own):
            self._judge(batch)
        for device, own in enumerate(self._left):
            for job, left in sorted(own.items()):
                for step in list(left):
                    self._step(device, (job, step))

    def _is_stepped(self, batch: StreamBatch, now: float) -> bool:
        return batch not in self._judges and self._ends[batch] <= now

    def _judge(self, batch: StreamBatch) -> None:
        if batch in self._judges:
            assert not self._parts.pop(batch), "what is judged has been backward everywhere"
            device = self._firsts[self._judges.pop(batch)]
            self._told[device].append(Measure(*batch))
            self._step(device, batch)

    def _step(self, device: int, batch: StreamBatch) -> None:
        """Has a stage take a job's next step, once it is judged."""
        job, step = batch
        self._judge(batch)
        left = self._left[device].get(job)
        if left and left[0] == step:
            left.popleft()
            self._told[device].append(Step(job, step))
