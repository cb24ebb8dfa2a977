"""The device with the least room decides how much jobs may take."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from weft.engine.execute.protocol import MemoryPeak, MicrobatchMemory, ReplicaMemory
from weft.engine.jobs.fitted_memory import FittedMemory
from weft.engine.timeline import TimelineRecorder
from weft.plan.admit import MARGIN
from weft.spec import AdapterSpec

KB = 1000


class Devices:
    """The account of devices of 105 kB that hold two full microbatches of 10 kB at a time."""

    def __init__(self, rest: Sequence[int], parts: Mapping[str, Sequence[float]]) -> None:
        self.rest, self.parts = rest, parts
        self.peaks: list[list[MemoryPeak]] = [[] for _ in rest]

    def memory(self) -> list[ReplicaMemory]:
        return [ReplicaMemory(105 * KB, rest) for rest in self.rest]

    def microbatches(self, capacity: int, adapters: Collection[AdapterSpec]) -> list[MicrobatchMemory]:
        return [MicrobatchMemory(10 * KB, 2) for _ in self.rest]

    def shares(self, job_bytes: Mapping[str, int]) -> list[float]:
        return [
            sum(self.parts[job][device] * num_bytes for job, num_bytes in job_bytes.items())
            for device, _ in enumerate(self.rest)
        ]

    def pop_peaks(self) -> list[list[MemoryPeak]]:
        found, self.peaks = self.peaks, [[] for _ in self.rest]
        return found


@pytest.mark.parametrize(
    ("sizes", "rest", "parts", "jobs", "room"),
    [
        ((1,), (30,), {"a": (1.0,)}, {"a": 8}, 50),
        # Two stages with half of every job each: the fuller one has room for halves.
        ((2,), (30, 20), {"a": (0.5, 0.5)}, {"a": 8}, 2 * 50),
        # Three quarters of the layers are on the second.
        ((2,), (30, 20), {"a": (0.25, 0.75)}, {"a": 9}, 60 * 4 / 3),
        # What the other replica's job holds takes nothing of the fuller one.
        ((1, 1), (30, 20), {"a": (1.0, 0.0), "b": (0.0, 1.0)}, {"a": 8, "b": 6}, 50 + 6),
    ],
)
def test_budget_when_devices_are_unlike_then_is_that_of_the_one_with_the_least_room(sizes, rest, parts, jobs, room):
    account: Any = Devices([KB * each for each in rest], parts)
    executor: Any = SimpleNamespace(account=account, facts=SimpleNamespace(replica_sizes=sizes))
    memory, seated = FittedMemory(executor, TimelineRecorder()), {job: KB * each for job, each in jobs.items()}
    memory.begin(100, [], {})

    def left() -> int:
        budget = memory.budget(100, [], 10, seated, seated, {})
        assert budget is not None and budget.margin == MARGIN and budget.usable_bytes is not None
        return budget.usable_bytes

    assert left() == pytest.approx(KB * room, abs=3)
    account.peaks[0] = [MemoryPeak(99 * KB, 200)]
    assert memory.learn(10, dict.fromkeys(jobs, 0)) and memory.has_peaks
    assert left() == pytest.approx(KB * (1 / parts["a"][0] + jobs.get("b", 0)), abs=3), "the first has hardly any room"
