"""Memory of the devices of replicas in stages: what stages report, and peaks that came back with programs.

A stage measures its peak from the end of one program to the end of the next, so nothing waits for it. A peak counts
only if no job has come to a stage or left one since its program was started: it is compared with what jobs hold.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence

from weft.engine.execute.protocol import MemoryPeak, MicrobatchMemory, ReplicaFacts, ReplicaMemory
from weft.parallel.stages.staged_jobs import StagedJobs
from weft.parallel.stages.work import StageGroup, StageOutcome
from weft.plan.types import max_lead
from weft.spec import AdapterSpec

QUESTIONS = 4
"""Answers that are kept."""


class StagedAccount:
    def __init__(self, stages: StageGroup, facts: ReplicaFacts, jobs: StagedJobs) -> None:
        self._stages, self._jobs = stages, jobs
        self._num_held = [
            # On CPUs nothing limits how far a stage runs ahead.
            most if facts.device_kind == "cpu" else size - index
            for size in facts.replica_sizes
            for index, most in enumerate(max_lead(size))
        ]
        self._answered: deque[tuple[tuple[int, list[AdapterSpec]], list[int]]] = deque(maxlen=QUESTIONS)
        self._peaks: list[list[MemoryPeak]] = [[] for _ in self._num_held]

    def memory(self) -> list[ReplicaMemory]:
        found: list[ReplicaMemory | None] = self._stages.call_all("memory")
        counted = [memory for memory in found if memory is not None]
        return counted if len(counted) == len(found) else []

    def microbatch_bytes(self, capacity: int, adapters: Collection[AdapterSpec]) -> list[int]:
        """Of one on each stage. Stages are called once for the same adapters: each call waits for their work."""
        question = capacity, list(adapters)
        # A copy at once: other threads may submit jobs meanwhile.
        for known, answer in list(self._answered):
            if known == question:
                return answer
        self._answered.append((question, self._stages.call_all("activation_bytes", *question)))
        return self._answered[-1][1]

    def microbatches(self, capacity: int, adapters: Collection[AdapterSpec]) -> list[MicrobatchMemory]:
        found = self.microbatch_bytes(capacity, adapters)
        return [MicrobatchMemory(*each) for each in zip(found, self._num_held, strict=True)]

    def shares(self, job_bytes: Mapping[str, int]) -> list[float]:
        return self._jobs.by_stage(job_bytes)

    def observe(self, outcomes: Sequence[StageOutcome], num_seatings: int) -> None:
        """Keeps the peaks of a program; `num_seatings`: as it was when the program was started."""
        if num_seatings == self._jobs.num_seatings:
            for own, outcome in zip(self._peaks, outcomes, strict=True):
                own += [] if outcome.peak is None else [outcome.peak]

    def pop_peaks(self) -> list[list[MemoryPeak]]:
        found, self._peaks = self._peaks, [[] for _ in self._peaks]
        return found
