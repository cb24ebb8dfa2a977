"""Non-negative least squares on measured microbatches: seconds or bytes as a sum of terms, each with a price.

    minimise  Σᵢ (xᵢ·β / yᵢ − 1)²  +  w² Σⱼ (βⱼ / β⁰ⱼ − 1)²     subject to  β ≥ 0

Errors are relative, so that small microbatches matter as much as large ones. β⁰ is the start of the fit, e.g. the
analytic model's prices; the second sum holds the prices that measurements do not determine and fades as they come in.
The terms extend mLoRA's β0 + β1·B·L + β2·B·L² to packed samples: rows, Σ length², Σ rank · tokens, jobs, and the
parameters of attached adapters. O(n·k²) for n measurements of k terms.

`OnlineFit` predicts every measurement before it learns from it, so its error is that of a model in use.
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
"""Weight of a starting price, relative to 1 for a measurement."""


@dataclass(frozen=True)
class MicrobatchLoad:
    rows: int
    """Computed rows: tokens rounded up to whole tiles."""
    pairs: int
    """Σ length² of the samples."""
    longest_pairs: int
    """length² of the longest sample: plain attention works on one sample at a time."""
    rank_tokens: int
    """Σ rank · tokens over the jobs."""
    rank_rows: int
    """Rows times the rank that all ranks are padded to."""
    jobs: int
    parameters: int
    """Parameters of all attached adapters, in the microbatch or not."""
    fixed: int = 1

    @staticmethod
    def of(
        jobs: Sequence[tuple[int, Sequence[int]]], parameters: int, row_tile: int = 1, widest_rank: int = 0
    ) -> MicrobatchLoad:
        """The load of each job's rank and sample lengths; `widest_rank`: that of any attached adapter."""
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
        return [float(getattr(self, term)) for term in terms]


@dataclass(frozen=True)
class FitError:
    mape: float
    p95: float
    """95th percentile, the margin to plan with."""
    count: int

    @staticmethod
    def of(predicted: Sequence[float], measured: Sequence[float]) -> FitError:
        if not measured:
            return FitError(0.0, 0.0, 0)
        off = np.abs(np.asarray(predicted) / np.asarray(measured) - 1.0)
        return FitError(float(off.mean()), float(np.quantile(off, 0.95, method="higher")), len(measured))


@dataclass(frozen=True)
class Fit:
    prices: Mapping[str, float]

    def predict(self, load: MicrobatchLoad) -> float:
        return sum(price * float(getattr(load, term)) for term, price in self.prices.items())

    def error(self, loads: Sequence[MicrobatchLoad], values: Sequence[float]) -> FitError:
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
        known = [column for column, term in enumerate(terms) if start.prices.get(term, 0.0) > 0]
        rows = np.zeros((len(known), len(terms)))
        for row, column in enumerate(known):
            rows[row, column] = START_WEIGHT / start.prices[terms[column]]
        x_NK = np.concatenate([x_NK, rows])
        y_N = np.concatenate([y_N, np.full(len(known), START_WEIGHT)])
    return Fit(dict(zip(terms, solve_nonnegative(x_NK, y_N), strict=True)))


def solve_nonnegative(x_NK: np.ndarray, y_N: np.ndarray) -> list[float]:
    """argmin |x β − y|, β ≥ 0, with columns scaled alike: terms differ by ten orders of magnitude."""
    from scipy.optimize import nnls

    scale_K = np.linalg.norm(x_NK, axis=0)
    scale_K[scale_K == 0] = 1.0
    found_K, _ = nnls(x_NK / scale_K, y_N)
    return [float(price) for price in found_K / scale_K]


@dataclass
class OnlineFit:
    """A fit that learns during training and measures its own error. `learn` belongs into another thread."""

    terms: tuple[str, ...]
    window: int = 256
    current: Fit | None = None
    _seen: deque[tuple[MicrobatchLoad, float]] = field(default_factory=deque)
    _errors: deque[tuple[float, float]] = field(default_factory=deque)

    @property
    def seen(self) -> tuple[tuple[MicrobatchLoad, float], ...]:
        return tuple(self._seen)

    def observe(self, load: MicrobatchLoad, value: float) -> None:
        """Records a measurement; invalid values (zero, not finite) are ignored."""
        if not (math.isfinite(value) and value > 0):
            return
        if self.current is not None:
            self._errors.append((self.current.predict(load), value))
        self._seen.append((load, value))
        for kept in (self._seen, self._errors):
            while len(kept) > self.window:
                kept.popleft()

    def learn(self, seen: Sequence[tuple[MicrobatchLoad, float]]) -> None:
        loads, values = zip(*seen, strict=True) if seen else ((), ())
        self.current = fit(loads, values, self.terms, self.current)

    def predict(self, load: MicrobatchLoad) -> float | None:
        """Predicted seconds or bytes; None before anything was learnt."""
        return None if self.current is None else self.current.predict(load)

    @property
    def error(self) -> FitError:
        """Error of the predictions made before each measurement."""
        predicted, measured = zip(*self._errors, strict=True) if self._errors else ((), ())
        return FitError.of(predicted, measured)


@dataclass(frozen=True)
class PaddedBatch:
    """A measured batch: `num_passes` passes of one layer over b × s."""

    size: int
    length: int
    num_passes: float
    """Layers × microbatches in sequence; (m + p − 1) · layers / p in a pipeline."""
    seconds: float


@dataclass(frozen=True)
class PaddedTime:
    """t(b, s) of one layer: prices of b·s², s², b·s, s, b and 1."""

    coefficients: tuple[float, float, float, float, float, float]


def fit_padded(batches: Sequence[PaddedBatch]) -> PaddedTime:
    """The coefficients that explain measured batches of one tensor-parallel degree best, by relative error."""
    if not batches:
        raise ConfigError("got no batches; a fit needs some.", where="fit_padded")
    rows = []
    for batch in batches:
        b, s = batch.size, batch.length
        terms = (b * s**2, s**2, b * s, s, b, 1.0)
        rows.append([batch.num_passes * term / batch.seconds for term in terms])
    found = solve_nonnegative(np.array(rows), np.ones(len(rows)))
    return PaddedTime(tuple(found))  # type: ignore[arg-type]
