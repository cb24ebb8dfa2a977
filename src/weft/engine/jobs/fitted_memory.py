"""Memory of an executor's devices beside the jobs: estimated from the model's shape, then fitted to measured peaks.

Every device has a fit of its own (`plan/cost/memory_fit.py`), over the tokens that it holds between forward and
backward, and the one with the least room decides. A job is taken to lie on the stages of a replica as all of them do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from weft.engine.execute.protocol import Executor, MicrobatchMemory, ReplicaMemory
from weft.engine.timeline import TimelineRecorder
from weft.plan.admit import MARGIN, Budget
from weft.plan.cost.fit import Fit
from weft.plan.cost.memory_fit import MemoryFit, memory_load
from weft.plan.layout import copies
from weft.plan.simulate.timeline import Span
from weft.spec import AdapterSpec


class FittedMemory:
    def __init__(self, executor: Executor, timeline: TimelineRecorder) -> None:
        """The timeline gets every measured peak, with the prediction before it."""
        self._account, sizes = executor.account, executor.facts.replica_sizes
        self._timeline = timeline
        self._replicas = [own for own in copies(len(sizes), sizes) for _ in own]
        """Devices of each device's replica."""
        self._fits = [MemoryFit() for _ in self._replicas]
        self._at_rest: Sequence[float] | None = None
        """Bytes of each device without jobs and microbatches, measured before the first one runs."""
        self._estimates: Sequence[Fit] = ()
        """Of what runs now."""

    @property
    def has_peaks(self) -> bool:
        return any(map(len, self._fits))

    def begin(self, capacity: int, adapters: Collection[AdapterSpec], allocated: Mapping[str, int]) -> None:
        """Before microbatches run beside jobs that have allocated so much: peaks from now on are theirs."""
        if self._at_rest is None:
            self._at_rest = self._without(self._account.memory(), allocated)
        self._account.pop_peaks()
        if self._at_rest:
            self._estimates = _prices(capacity, self._account.microbatches(capacity, adapters), self._at_rest)

    def learn(self, longest: int, allocated: Mapping[str, int]) -> bool:
        """Fits to the peaks since `begin`; False if there are none."""
        peaks = self._account.pop_peaks()
        if not any(peaks) or not self._estimates:
            return False
        now_s, jobs = self._timeline.now(), self._account.shares(allocated)
        for device, (fit, estimate, own) in enumerate(zip(self._fits, self._estimates, jobs, strict=True)):
            for peak in peaks[device]:
                load, own_bytes = memory_load(peak.tokens, longest), round(own)
                predicted = fit.predict(load, estimate) + own_bytes
                fit.observe(load, peak.num_bytes - own_bytes)
                figures = {"tokens": peak.tokens, "peak_bytes": peak.num_bytes, "predicted_bytes": predicted}
                self._timeline.spans.append(Span("memory", now_s, 0.0, figures, device))
        return True

    def forget(self) -> None:
        """Clears all peaks."""
        for fit in self._fits:
            fit.clear()
        self._account.pop_peaks()

    def budget(
        self,
        capacity: int,
        adapters: Collection[AdapterSpec],
        longest: int,
        jobs: Mapping[str, int],
        seated: Mapping[str, int],
        allocated: Mapping[str, int],
    ) -> Budget | None:
        """What all jobs may take beside microbatches, by the device with the least room; None where memory is not
        counted. `jobs`: bytes of all, `seated`: of those that have a seat, `allocated`: what these hold already."""
        memory = self._account.memory()
        if not memory:
            return None
        microbatches = self._account.microbatches(capacity, adapters)
        prices = _prices(capacity, microbatches, self._at_rest or self._without(memory, allocated))
        shares, held = self._account.shares(jobs), self._account.shares(seated)
        found = []
        for device, stages in enumerate(self._replicas):
            load = memory_load(capacity * microbatches[device].num_held, longest)
            fixed = self._fits[device].predict(load, prices[device])
            # A device has a share of every job of its replica, and nothing of jobs on other replicas.
            whole = sum(shares[stage] for stage in stages) / shares[device] if shares[device] else len(stages)
            elsewhere = sum(seated.values()) - whole * held[device]
            total = round(whole * memory[device].usable_bytes)
            found.append(Budget(total, round(whole * fixed - elsewhere), MARGIN))
        return min(found, key=lambda budget: budget.usable_bytes or 0)

    def _without(self, memory: Sequence[ReplicaMemory], allocated: Mapping[str, int]) -> list[float]:
        jobs = self._account.shares(allocated)
        return [each.allocated_bytes - own for each, own in zip(memory, jobs, strict=True)] if memory else []


def _prices(capacity: int, microbatches: Sequence[MicrobatchMemory], at_rest: Sequence[float]) -> list[Fit]:
    """The memory model's."""
    return [
        Fit({"fixed": rest, "rows": each.num_bytes / capacity})
        for rest, each in zip(at_rest, microbatches, strict=True)
    ]
