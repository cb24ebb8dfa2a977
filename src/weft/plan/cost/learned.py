"""What stages take, learnt from the microbatches that have run on them.

Every pass of a stage is fitted on the terms of `cost/fit.py`. What adapters take is told apart from the rest: it grows
with the jobs of a microbatch and not with its rows, which decides whether jobs should share microbatches. Where all
microbatches have the same jobs, nothing can be told apart, and all counts as the backbone's.

What a job's adapter adds to a pass of every microbatch that the job is in.

Measured as adapters run in training, side by side in one microbatch: what several of them take is the sum. So each has
a share of 1 of the device in MuxTune's terms, which profile adapters one by one.

What devices that share every layer wait for sums, and what two passes took side by side, learnt from those that ran.

A pass that runs alone tells how much of it was waiting, which is what another beside it could hide. Once pairs have
run, what they took counts instead, against what their passes are known to take alone.
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
    """Of one pass on one stage, the mean over passes and stages."""

    job_s: float
    """However few its tokens: launches, its weights and gradients read and written."""
    rank_token_s: float
    """Per rank and token."""
    ranks: Mapping[str, int] = field(default_factory=dict)

    def seconds(self, job: str, num_tokens: float) -> float:
        """Of one job with so many tokens in the microbatch."""
        return self.job_s + self.rank_token_s * self.ranks.get(job, 0) * num_tokens

    def microbatch_s(self, tokens: Mapping[str, int]) -> float:
        """Of all jobs of a microbatch, with the tokens of each."""
        return sum(self.seconds(job, count) for job, count in tokens.items())


PASSES = ("forward", "backward")
ADAPTER_TERMS = ("rank_tokens", "jobs")
WINDOW = 256
"""Passes of a stage that are remembered."""
FEWEST = 12
"""Passes of each stage before anything is concluded."""


@dataclass(frozen=True)
class LearnedCost:
    """A `CostModel` of measured passes without adapters; what was not measured comes from a table."""

    passes: Mapping[tuple[str, int], Fit]
    """By name and stage."""
    steps_s: Mapping[int, float]
    """One job's step, by stage."""
    row_tile: int
    table: CostModel

    def forward_s(self, lengths: Sequence[int], stage: int) -> float:
        """One microbatch forward through one stage."""
        return self._seconds("forward", lengths, stage)

    def backward_s(self, lengths: Sequence[int], stage: int) -> float:
        """The same, backward."""
        return self._seconds("backward", lengths, stage)

    def transfer_s(self, num_tokens: int) -> float:
        """As the table says."""
        return self.table.transfer_s(num_tokens)

    def step_s(self, stage: int) -> float:
        """One job's optimizer step on one stage."""
        return self.steps_s.get(stage, self.table.step_s(stage))

    def held_bytes(self, lengths: Sequence[int], stage: int) -> int:
        """As the table says."""
        return self.table.held_bytes(lengths, stage)

    def _seconds(self, name: str, lengths: Sequence[int], stage: int) -> float:
        if not lengths:
            return 0.0
        # Without jobs of any rank, what is left is the backbone's own.
        return self.passes[name, stage].predict(MicrobatchLoad.of([(0, lengths)], 0, self.row_tile))


@dataclass
class StagePace:
    """Collects what passes and steps of stages take."""

    row_tile: int = 1
    _passes: dict[tuple[str, int], deque[tuple[MicrobatchLoad, float]]] = field(default_factory=dict)
    _steps: dict[int, deque[float]] = field(default_factory=dict)

    def note_pass(self, name: str, stage: int, load: MicrobatchLoad, seconds: float) -> None:
        """One microbatch forward or backward on a stage."""
        if seconds > 0:
            self._passes.setdefault((name, stage), deque(maxlen=WINDOW)).append((load, seconds))

    def note_step(self, stage: int, seconds: float) -> None:
        """One job's optimizer step on a stage."""
        self._steps.setdefault(stage, deque(maxlen=WINDOW)).append(seconds)

    @property
    def num_seen(self) -> int:
        """Passes of the stage that is known least."""
        return min((len(own) for own in self._passes.values()), default=0)

    def learn(
        self, num_stages: int, table: CostModel, ranks: Mapping[str, int], first: int = 0
    ) -> tuple[LearnedCost, AdapterTimes] | None:
        """What the backbone takes, and what adapters add; None before enough has been seen.

        `first`: the first stage of the replica, where there are several.
        """
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
    """Where a fit starts: all time is the rows'. So a price for jobs has to be shown by measurements."""
    rows = sum(load.rows for load in loads)
    return Fit({"rows": sum(seconds) / rows})


Pair = tuple[MicrobatchLoad, MicrobatchLoad]
PassOf = tuple[str, int]
"""The name of a pass, and its stage."""


@dataclass(frozen=True)
class MeasuredPairs:
    """What was learnt of passes; nothing of those that have not been seen often enough."""

    sums: Mapping[PassOf, float] = field(default_factory=dict)
    """The part of a pass that is waiting for sums."""
    pairs: Mapping[PassOf, float] = field(default_factory=dict)
    """What two passes take side by side, as a part of what they take one after another."""


@dataclass
class PairPace:
    """Collects what sums and pairs take."""

    _sums: dict[PassOf, deque[tuple[float, float]]] = field(default_factory=dict)
    _pairs: dict[PassOf, deque[tuple[Pair, float]]] = field(default_factory=dict)

    def note_sums(self, name: PassOf, sums_s: float, seconds: float) -> None:
        """One pass that ran alone, and how long of that it waited."""
        self._sums.setdefault(name, deque(maxlen=WINDOW)).append((sums_s, seconds))

    def note_pair(self, name: PassOf, loads: Pair, seconds: float) -> None:
        """Two passes, from the beginning of the first to the end of the last."""
        self._pairs.setdefault(name, deque(maxlen=WINDOW)).append((loads, seconds))

    def learn(self, alone: Mapping[PassOf, Fit]) -> MeasuredPairs:
        """What is known; `alone`: what passes take by themselves, as far as that has been learnt."""
        # Copies: others go on noting meanwhile.
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
