"""Memory beside the jobs, fitted online from measured peaks, as in mLoRA's section 3.4.

    peak − bytes of the jobs  ≈  β0 + β1 · rows + β2 · longest²,     β ≥ 0

Rows are the tokens of the largest microbatch while the peak was measured, `longest` is its longest sample. The bytes of
jobs are known and not fitted. The fit starts from the memory model's estimate (`cost/fit.py`), which so decides what
the peaks leave open, such as the price of a row where all microbatches are alike.

- No peak lies above the fit: it is raised until none does.
- Fewer than `ENOUGH` peaks only correct the estimate: upwards to the largest of them, downwards by `MARGIN` at most. So
  a few peaks admit nothing that the estimate refuses by more than that.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from weft.plan.admit import MARGIN
from weft.plan.cost.fit import Fit, MicrobatchLoad, fit

TERMS = ("fixed", "rows", "longest_pairs")
ENOUGH = 8
"""Peaks from which on the fit replaces the estimate."""
WINDOW = 256


def memory_load(rows: int, longest: int) -> MicrobatchLoad:
    return MicrobatchLoad(rows, 0, longest_pairs=longest**2, rank_tokens=0, rank_rows=0, jobs=0, parameters=0)


@dataclass
class MemoryFit:
    _peaks: deque[tuple[MicrobatchLoad, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _count: int = 0
    """Number of peaks so far, including those that have left the window."""
    _fitted: Fit | None = None
    _next_fit: int = ENOUGH
    """Number of peaks at which the next fit is due: twice as many each time, since a fit takes tens of milliseconds."""
    _above: float = 0.0
    """Bytes by which a peak has exceeded the fit."""

    def __len__(self) -> int:
        return len(self._peaks)

    def observe(self, load: MicrobatchLoad, num_bytes: int) -> None:
        """Records the most bytes that were held beside the jobs."""
        if num_bytes <= 0:
            return
        self._peaks.append((load, float(num_bytes)))
        self._count += 1
        if self._fitted is not None:
            self._above = max(self._above, num_bytes - self._fitted.predict(load))

    def clear(self) -> None:
        self._peaks.clear()
        self._count, self._fitted, self._next_fit = 0, None, ENOUGH

    def predict(self, load: MicrobatchLoad, estimate: Fit) -> int:
        """The most bytes beside the jobs; `estimate`: prices of the memory model."""
        if self._count < ENOUGH:
            guess = estimate.predict(load)
            measured = [peak for seen, peak in self._peaks if seen.rows <= load.rows]
            return math.ceil(max([guess * (1 - MARGIN), *measured]) if measured else guess)
        if self._fitted is None or self._count >= self._next_fit:
            loads, peaks = zip(*self._peaks, strict=True)
            self._fitted, self._next_fit = fit(loads, peaks, TERMS, estimate), 2 * self._count
            self._above = max(0.0, *(peak - self._fitted.predict(seen) for seen, peak in self._peaks))
        return math.ceil(self._fitted.predict(load) + self._above)
