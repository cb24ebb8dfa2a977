"""The time of padded batches under <tp, pp>, as LobRA models it (appendix D): for planning deployments.

One layer over b samples padded to s tokens, fitted per tensor-parallel degree with non-negative coefficients:
    t(b, s) = (c1·b + c2)·s² + (c3·b + c4)·s + (c5·b + c6),    t(0, s) = 0
A replica with p stages runs the m microbatches of every bucket j, the remainder as one more:
    T = Σⱼ (mⱼ·t(bⱼ, sⱼ) + t(rⱼ, sⱼ)) + (p − 1) · max of all t,    each t over layers / p layers
T is linear in the number of samples per bucket but for the remainder, so that dispatch can be an integer program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.errors import ConfigError
from weft.plan.cost.fit import solve_nonnegative


@dataclass(frozen=True)
class PaddedBatch:
    """A measured batch: `num_passes` times one layer over b × s took so long."""

    size: int
    length: int
    num_passes: float
    """Layers × microbatches one after another; (m + p − 1) · layers / p in a pipeline."""
    seconds: float


@dataclass(frozen=True)
class PaddedTime:
    """t(b, s) of one layer."""

    coefficients: tuple[float, float, float, float, float, float]

    def layer_s(self, size: int, length: int) -> float:
        """One layer forward and backward over a padded batch; none of an empty one."""
        if size == 0:
            return 0.0
        return float(np.dot(self.coefficients, _features(size, length)))

    def step_s(self, buckets: Sequence[tuple[int, int, int]], num_layers: int, num_stages: int = 1) -> float:
        """T of buckets (samples, samples per microbatch, padded length) on one replica."""
        layers = num_layers / num_stages
        total, longest = 0.0, 0.0
        for count, size, length in buckets:
            if size < 1:
                raise ConfigError(f"got {size} samples per microbatch; at least 1.", where="buckets")
            full, rest = divmod(count, size)
            times = (self.layer_s(size, length) if full else 0.0, self.layer_s(rest, length))
            total += layers * (full * times[0] + times[1])
            longest = max(longest, *times)
        return total + (num_stages - 1) * layers * longest


def fit_padded(batches: Sequence[PaddedBatch]) -> PaddedTime:
    """The coefficients that explain measured batches of one tensor-parallel degree best, relatively."""
    if not batches:
        raise ConfigError("got no batches; a fit needs some.", where="fit_padded")
    rows = [[batch.num_passes * x / batch.seconds for x in _features(batch.size, batch.length)] for batch in batches]
    found = solve_nonnegative(np.array(rows), np.ones(len(rows)))
    return PaddedTime(tuple(found))  # type: ignore[arg-type]


def _features(size: int, length: int) -> tuple[float, ...]:
    return (size * length**2, length**2, size * length, length, size, 1.0)
