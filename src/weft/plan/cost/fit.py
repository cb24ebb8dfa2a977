"""Non-negative least squares on measured microbatches: seconds or bytes as a sum of terms, each with a price.

    minimise  Σᵢ (xᵢ·β / yᵢ − 1)²  +  w² Σⱼ (βⱼ / β⁰ⱼ − 1)²     subject to  β ≥ 0
Relative errors count, so that small microbatches matter as much as large ones. β⁰ is where the fit starts, e.g. the
analytic model's prices; the second sum holds the prices that measurements say nothing about and fades as they come in.
The terms extend mLoRA's β0 + β1·B·L + β2·B·L² to packed samples: rows, Σ length², Σ rank · tokens, jobs, and the
parameters of attached adapters. O(n·k²) for n measurements of k terms.

`OnlineFit` predicts every measurement before it learns from it: its error is that of a model in use.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from weft.errors import ConfigError
from weft.plan.cost.memory import rank_class

TIME_TERMS = ("fixed", "rows", "pairs", "rank_tokens", "jobs")
MEMORY_TERMS = ("fixed", "rows", "pairs", "longest_pairs", "rank_tokens", "rank_rows", "parameters")
STEP_TERMS = ("fixed", "jobs", "parameters")
START_WEIGHT = 0.1
"""Of a price that a fit starts from, beside a value of weight 1."""


@dataclass(frozen=True)
class MicrobatchLoad:
    """What a microbatch asks of a device."""

    rows: int
    """Computed rows: the tokens, filled up to whole tiles."""
    pairs: int
    """Σ length² of the samples."""
    longest_pairs: int
    """length² of the longest: plain attention works on one sample at a time."""
    rank_tokens: int
    """Σ rank · tokens over the jobs."""
    rank_rows: int
    """Rows times what all ranks are padded to."""
    jobs: int
    parameters: int
    """Of all attached adapters, in the microbatch or not."""
    fixed: int = 1

    @staticmethod
    def of(
        jobs: Sequence[tuple[int, Sequence[int]]], parameters: int, row_tile: int = 1, widest_rank: int = 0
    ) -> MicrobatchLoad:
        """From each job's rank and the lengths of its samples; `widest_rank` is that of any attached adapter."""
        lengths = [length for _, own in jobs for length in own]
        rows = -(-sum(lengths) // row_tile) * row_tile
        ranks = [rank for rank, _ in jobs if rank]
        widest = rank_class([*ranks, widest_rank]) if ranks or widest_rank else 0
        return MicrobatchLoad(
            rows=rows,
            pairs=sum(length * length for length in lengths),
            longest_pairs=max(lengths, default=0) ** 2,
            rank_tokens=sum(rank * sum(own) for rank, own in jobs),
            rank_rows=rows * widest,
            jobs=len(ranks),
            parameters=parameters,
        )

    def features(self, terms: Sequence[str]) -> list[float]:
        """The amounts of the named terms."""
        return [float(getattr(self, term)) for term in terms]


@dataclass(frozen=True)
class FitError:
    """How far predictions were off, relative to what was measured."""

    mape: float
    """Mean absolute error."""
    p95: float
    """95 of 100 were no further off; the margin to plan with."""
    count: int

    @staticmethod
    def of(predicted: Sequence[float], measured: Sequence[float]) -> FitError:
        """The error of predictions; zero of nothing."""
        if not measured:
            return FitError(0.0, 0.0, 0)
        off = np.abs(np.asarray(predicted) / np.asarray(measured) - 1.0)
        return FitError(float(off.mean()), float(np.quantile(off, 0.95, method="higher")), len(measured))


@dataclass(frozen=True)
class Fit:
    """A price for every term."""

    prices: Mapping[str, float]

    def predict(self, load: MicrobatchLoad) -> float:
        """Seconds or bytes of a load."""
        return sum(price * float(getattr(load, term)) for term, price in self.prices.items())

    def error(self, loads: Sequence[MicrobatchLoad], values: Sequence[float]) -> FitError:
        """How well it predicts these."""
        return FitError.of([self.predict(load) for load in loads], values)


def fit(
    loads: Sequence[MicrobatchLoad],
    values: Sequence[float],
    terms: Sequence[str],
    start: Fit | None = None,
) -> Fit:
    """The prices that explain the values best; deterministic."""
    if not values or any(not (math.isfinite(value) and value > 0) for value in values):
        raise ConfigError(f"got {len(values)} values; a fit needs some, all finite and above 0.", where="fit")
    x_NK = np.array([load.features(terms) for load in loads]) / np.asarray(values, dtype=float)[:, None]
    y_N = np.ones(len(values))
    if start is not None:
        known = [place for place, term in enumerate(terms) if start.prices.get(term, 0.0) > 0]
        rows = np.zeros((len(known), len(terms)))
        for row, place in enumerate(known):
            rows[row, place] = START_WEIGHT / start.prices[terms[place]]
        x_NK = np.concatenate([x_NK, rows])
        y_N = np.concatenate([y_N, np.full(len(known), START_WEIGHT)])
    return Fit(dict(zip(terms, solve_nonnegative(x_NK, y_N), strict=True)))


def solve_nonnegative(x_NK: np.ndarray, y_N: np.ndarray) -> list[float]:
    """argmin |x β − y|, β ≥ 0, with columns brought to one size: terms differ by ten orders of magnitude."""
    from scipy.optimize import nnls

    scale_K = np.linalg.norm(x_NK, axis=0)
    scale_K[scale_K == 0] = 1.0
    found_K, _ = nnls(x_NK / scale_K, y_N)
    return [float(price) for price in found_K / scale_K]


@dataclass
class OnlineFit:
    """A fit that learns while training runs, and knows its own error.

    Noting a measurement takes microseconds. `learn` solves, so it is for whoever has the time, such as another thread.
    """

    terms: tuple[str, ...]
    window: int = 256
    """Measurements it remembers; older ones fade with the device's temper."""
    current: Fit | None = None
    _seen: deque[tuple[MicrobatchLoad, float]] = field(default_factory=deque)
    _errors: deque[tuple[float, float]] = field(default_factory=deque)

    @property
    def seen(self) -> tuple[tuple[MicrobatchLoad, float], ...]:
        """The measurements it remembers."""
        return tuple(self._seen)

    def observe(self, load: MicrobatchLoad, value: float) -> None:
        """Notes one measurement; values that are no measurement (zero, not finite) are left out."""
        if not (math.isfinite(value) and value > 0):
            return
        if self.current is not None:
            self._errors.append((self.current.predict(load), value))
        self._seen.append((load, value))
        for kept in (self._seen, self._errors):
            while len(kept) > self.window:
                kept.popleft()

    def learn(self, seen: Sequence[tuple[MicrobatchLoad, float]]) -> None:
        """Fits measurements; what they do not tell is held by the fit there was before."""
        loads, values = zip(*seen, strict=True) if seen else ((), ())
        self.current = fit(loads, values, self.terms, self.current)

    def predict(self, load: MicrobatchLoad) -> float | None:
        """Seconds or bytes of a load, from what has been learnt; None before anything has."""
        return None if self.current is None else self.current.predict(load)

    @property
    def error(self) -> FitError:
        """Of the predictions made before each measurement was known."""
        predicted, measured = zip(*self._errors, strict=True) if self._errors else ((), ())
        return FitError.of(predicted, measured)
