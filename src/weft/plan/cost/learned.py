"""Seconds of stages and adapters, learnt from the microbatches that have run.

Every pass of a stage is fitted on the terms of `cost/fit.py`. Adapters are separated from the backbone: their time
grows with the jobs of a microbatch and not with its rows, which decides whether jobs should share microbatches. If all
microbatches have the same jobs, they cannot be separated, and all time counts as the backbone's.

Adapters are measured as they run in training, side by side in one microbatch, so the time of several is the sum: each
has a share of 1 of the device in MuxTune's terms, which profile adapters one by one.

For devices that share every layer: a pass that runs alone shows its share of waiting for all-reduces, which another
pass beside it could hide. Once pairs have run, their measured time counts instead, relative to their passes alone.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from weft.plan.cost.fit import TIME_TERMS, Fit, MicrobatchLoad, fit
from weft.plan.cost.types import CostModel


@dataclass(frozen=True)
class AdapterTimes:
    """Seconds of adapters per pass on one stage, the mean over passes and stages."""

    job_s: float
    """Seconds per job, however few its tokens: launches, its weights and gradients read and written."""
    rank_token_s: float
    """Seconds per rank and token."""
    ranks: Mapping[str, int] = field(default_factory=dict)

    def seconds(self, job: str, num_tokens: float) -> float:
        return self.job_s + self.rank_token_s * self.ranks.get(job, 0) * num_tokens

    def microbatch_s(self, tokens: Mapping[str, int]) -> float:
        return sum(self.seconds(job, count) for job, count in tokens.items())


PassCosts = tuple[CostModel, AdapterTimes | None]
"""Expected costs of passes on a replica, without and with adapters."""
PASSES = ("forward", "backward")
ADAPTER_TERMS = ("rank_tokens", "jobs")
WINDOW = 256
LEAST_S = 1e-6
"""Minimum time of a pass: planners order what happens by when it ends."""
FEWEST = 12
"""Number of passes of each stage that are needed to learn."""


@dataclass(frozen=True)
class LearnedCost:
    passes: Mapping[tuple[str, int], Fit]
    steps_s: Mapping[int, float]
    row_tile: int
    table: CostModel

    def forward_s(self, lengths: Sequence[int], stage: int) -> float:
        return self._seconds("forward", lengths, stage)

    def backward_s(self, lengths: Sequence[int], stage: int) -> float:
        return self._seconds("backward", lengths, stage)

    def transfer_s(self, num_tokens: int) -> float:
        return self.table.transfer_s(num_tokens)

    def step_s(self, stage: int) -> float:
        return self.steps_s.get(stage, self.table.step_s(stage))

    def held_bytes(self, lengths: Sequence[int], stage: int) -> int:
        return self.table.held_bytes(lengths, stage)

    def _seconds(self, name: str, lengths: Sequence[int], stage: int) -> float:
        if not lengths:
            return 0.0
        # A job of rank 0 leaves the backbone's part, which may be nothing if all microbatches are alike.
        found = self.passes[name, stage].predict(MicrobatchLoad.of([(0, lengths)], 0, self.row_tile))
        return max(LEAST_S, found)


@dataclass
class StagePace:
    row_tile: int = 1
    _passes: dict[tuple[str, int], deque[tuple[MicrobatchLoad, float]]] = field(default_factory=dict)
    _steps: dict[int, deque[float]] = field(default_factory=dict)

    def note_pass(self, name: str, stage: int, load: MicrobatchLoad, seconds: float) -> None:
        if seconds > 0:
            self._passes.setdefault((name, stage), deque(maxlen=WINDOW)).append((load, seconds))

    def note_step(self, stage: int, seconds: float) -> None:
        self._steps.setdefault(stage, deque(maxlen=WINDOW)).append(seconds)

    @property
    def num_seen(self) -> int:
        return min((len(own) for own in self._passes.values()), default=0)

    def learn(
        self, num_stages: int, table: CostModel, ranks: Mapping[str, int], first: int = 0
    ) -> tuple[LearnedCost, AdapterTimes] | None:
        """The costs of the backbone, and of adapters; None before enough passes. `first`: the replica's first stage."""
        wanted = [(name, stage) for name in PASSES for stage in range(num_stages)]
        if any(len(self._passes.get((name, first + stage), ())) < FEWEST for name, stage in wanted):
            return None
        fits = {}
        for name, stage in wanted:
            loads, seconds = zip(*self._passes[name, first + stage], strict=True)
            fits[name, stage] = fit(loads, seconds, TIME_TERMS, _guess(loads, seconds))
        prices = {term: statistics.mean(found.prices[term] for found in fits.values()) for term in ADAPTER_TERMS}
        steps = {stage - first: statistics.median(own) for stage, own in self._steps.items()}
        adapters = AdapterTimes(prices["jobs"], prices["rank_tokens"], dict(ranks))
        return LearnedCost(fits, steps, self.row_tile, table), adapters


def _guess(loads: Sequence[MicrobatchLoad], seconds: Sequence[float]) -> Fit:
    """The start of a fit: all time depends on rows, so measurements must prove a price for jobs."""
    rows = sum(load.rows for load in loads)
    return Fit({"rows": sum(seconds) / rows})


Pair = tuple[MicrobatchLoad, MicrobatchLoad]
PassOf = tuple[str, int]


@dataclass(frozen=True)
class MeasuredPairs:
    """Learnt ratios of passes that were seen often enough."""

    sums: Mapping[PassOf, float] = field(default_factory=dict)
    """Share of a pass that waits for all-reduces."""
    pairs: Mapping[PassOf, float] = field(default_factory=dict)
    """Ratio of the time of two passes side by side to that of both in sequence."""


@dataclass
class PairPace:
    _sums: dict[PassOf, deque[tuple[float, float]]] = field(default_factory=dict)
    _pairs: dict[PassOf, deque[tuple[Pair, float]]] = field(default_factory=dict)

    def note_sums(self, name: PassOf, sums_s: float, seconds: float) -> None:
        self._sums.setdefault(name, deque(maxlen=WINDOW)).append((sums_s, seconds))

    def note_pair(self, name: PassOf, loads: Pair, seconds: float) -> None:
        """Records two passes side by side, from the start of the first to the end of the last."""
        self._pairs.setdefault(name, deque(maxlen=WINDOW)).append((loads, seconds))

    def learn(self, alone: Mapping[PassOf, Fit]) -> MeasuredPairs:
        """The learnt ratios; `alone`: fits of single passes, as far as learnt."""
        # Copies, because other threads add to them.
        waits = {name: list(seen) for name, seen in list(self._sums.items()) if len(seen) >= FEWEST}
        taken = {name: list(seen) for name, seen in list(self._pairs.items()) if len(seen) >= FEWEST and name in alone}
        sums = {
            name: sum(sums_s for sums_s, _ in seen) / sum(all_s for _, all_s in seen) for name, seen in waits.items()
        }
        pairs = {}
        for name, seen in taken.items():
            one_by_one_s = sum(alone[name].predict(load) for loads, _ in seen for load in loads)
            pairs[name] = sum(seconds for _, seconds in seen) / one_by_one_s
        return MeasuredPairs(sums, pairs)
