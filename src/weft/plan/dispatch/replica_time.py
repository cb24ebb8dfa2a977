"""What one replica takes for samples of each bucket, whatever its layout.

A replica runs chunks (its microbatches) of at most `most_tokens` tokens. A chunk of n samples of one bucket takes

    slope · n + base        seconds on the slowest stage, for n from 1 to the samples that fit

which is t(b, s) of `cost/padded.py` for a given s, over layers / stages layers. Packed, samples keep their own lengths
and chunks mix buckets: slope is then that of a bucket's mean sample, base that of a whole chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from weft.plan.bucket import Buckets
from weft.plan.cost.padded import PaddedTime
from weft.plan.layout import ReplicaLayout

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BucketCosts:
    """What samples of each bucket cost on one replica."""

    slope_R: FloatArray
    """Seconds per sample."""
    base_R: FloatArray
    """Seconds per chunk."""
    size_R: FloatArray
    """Samples of a full chunk, whole ones unless packed; 0: the replica cannot hold one of them."""

    @property
    def sample_s_R(self) -> FloatArray:
        """Seconds of a sample in full chunks: no way of running it takes fewer. Infinite where it does not fit."""
        size = np.maximum(self.size_R, 1.0)
        return np.where(self.size_R > 0, self.slope_R + self.base_R / size, np.inf)

    @property
    def alone_s_R(self) -> FloatArray:
        """Seconds of a chunk with one sample; infinite where it does not fit."""
        return np.where(self.size_R > 0, self.slope_R + self.base_R, np.inf)


class ReplicaModel(Protocol):
    """What dispatch asks of one kind of replica."""

    @property
    def layout(self) -> ReplicaLayout:
        """How it is spread over GPUs."""
        ...

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest chunk, and so of the longest sample, that it holds."""
        ...

    @property
    def is_packed(self) -> bool:
        """Whether chunks mix samples of different lengths without padding."""
        ...

    def costs(self, buckets: Buckets) -> BucketCosts:
        """What samples of these buckets cost."""
        ...


@dataclass(frozen=True)
class ReplicaTime:
    """A replica whose time was fitted as LobRA's appendix D does."""

    layout: ReplicaLayout
    most_tokens: int
    time: PaddedTime
    """Of one layer at the layout's tensor-parallel degree."""
    num_layers: int
    is_packed: bool = False

    def costs(self, buckets: Buckets) -> BucketCosts:
        """Padded to the bounds, or, packed, with the mean of the samples' own lengths."""
        c1, c2, c3, c4, c5, c6 = (c * self.num_layers / self.layout.stages for c in self.time.coefficients)
        bounds = np.asarray(buckets.bounds, dtype=np.float64)
        size = self.most_tokens // bounds
        if not self.is_packed:
            return BucketCosts(c1 * bounds**2 + c3 * bounds + c5, c2 * bounds**2 + c4 * bounds + c6, size)
        counts = np.asarray(buckets.counts)
        mean, pairs = np.asarray(buckets.tokens) / counts, np.asarray(buckets.pairs) / counts
        slope, base = c1 * pairs + c3 * mean + c5, c2 * pairs + c4 * mean + c6
        return BucketCosts(slope, base, np.where(size > 0, self.most_tokens / mean, 0.0))
