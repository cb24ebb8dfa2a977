"""The order of a job's samples: a pure function of the job's seed, so a resumed job has the same."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from weft.spec import JobSpec

Integers = npt.NDArray[np.int64]


def permutation(num_items: int, entropy: tuple[int, ...]) -> Integers:
    """The numbers 0 to num_items - 1 in an order drawn from `entropy`. Sorts raw random bits: numpy keeps those the
    same from version to version, but not `Generator.permutation`."""
    keys = np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(num_items)
    return np.argsort(keys, kind="stable").astype(np.int64)


@dataclass(frozen=True)
class Mixture:
    """Sources whose samples are concatenated, and the share of each in an epoch. An epoch is as long as all sources
    together. A source with a smaller share continues in the next epoch where it stopped, and one with a larger share
    starts again: over a whole job, the uses of two samples of a source differ by at most one."""

    sizes: tuple[int, ...]
    weights: tuple[float, ...]

    @functools.cached_property
    def counts(self) -> tuple[int, ...]:
        total, whole = sum(self.sizes), sum(map(Fraction, self.weights))
        shares = [Fraction(weight) * total / whole for weight in self.weights]
        counts = [int(share) for share in shares]
        # What rounding down left over goes to those that lost most by it.
        order = sorted(range(len(shares)), key=lambda i: counts[i] - shares[i])
        for i in order[: total - sum(counts)]:
            counts[i] += 1
        return tuple(counts)

    def epoch(self, seed: int, epoch: int, *, shuffle: bool) -> Integers:
        """The samples of one epoch in their order; without `shuffle` those of each source are spread evenly."""
        drawn = [
            self._drawn(i, epoch * count, (epoch + 1) * count, seed, shuffle=shuffle)
            for i, count in enumerate(self.counts)
        ]
        if shuffle:
            return np.concatenate(drawn)[permutation(sum(self.sizes), (seed, epoch))]
        positions = [(np.arange(count) + 0.5) / count for count in self.counts]
        return np.concatenate(drawn)[np.argsort(np.concatenate(positions), kind="stable")]

    def met(self, num_epochs: int, seed: int, *, shuffle: bool) -> Integers:
        """Number of uses of each sample in so many whole epochs."""
        uses = np.zeros(sum(self.sizes), np.int64)
        for i, (size, count) in enumerate(zip(self.sizes, self.counts, strict=True)):
            passes, rest = divmod(num_epochs * count, size)
            first = sum(self.sizes[:i])
            uses[first : first + size] += passes
            uses[self._drawn(i, passes * size, passes * size + rest, seed, shuffle=shuffle)] += 1
        return uses

    def _drawn(self, source: int, begin: int, end: int, seed: int, *, shuffle: bool) -> Integers:
        """The samples of a source from one index to another in the concatenation of its passes."""
        size, pieces = self.sizes[source], [np.empty(0, np.int64)]
        for number in range(begin // size, -(-end // size)):
            # The third number keeps these draws apart from those of epochs and of the split.
            order = permutation(size, (seed, number, 2, source)) if shuffle else np.arange(size)
            pieces.append(order[max(0, begin - number * size) : end - number * size])
        return np.concatenate(pieces) + sum(self.sizes[:source])


@functools.lru_cache(maxsize=64)
def epoch_order(num_samples: int, *, seed: int, epoch: int, shuffle: bool, mixture: Mixture | None = None) -> Integers:
    """Sample indices in the order of one epoch (counted from 0); the array is read-only."""
    if mixture is not None:
        order = mixture.epoch(seed, epoch, shuffle=shuffle)
    else:
        order = permutation(num_samples, (seed, epoch)) if shuffle else np.arange(num_samples, dtype=np.int64)
    order.setflags(write=False)
    return order


@dataclass(frozen=True)
class BatchSchedule:
    """The samples in the global batch of each optimizer step of a job. No batch crosses epochs; an epoch's last may be
    smaller."""

    num_samples: int
    batch_size: int
    num_epochs: float
    max_steps: int | None
    """Number of steps, which overrides num_epochs."""
    seed: int
    shuffle: bool
    mixture: Mixture | None = None

    @classmethod
    def of(cls, job: JobSpec, *sizes: int) -> BatchSchedule:
        """The schedule of a job with so many training samples of each source, or of all together."""
        weights = job.source_weights
        return cls(
            num_samples=sum(sizes),
            batch_size=job.batch_size,
            num_epochs=job.num_train_epochs,
            max_steps=job.max_steps,
            seed=job.seed,
            shuffle=job.shuffle,
            mixture=None if weights is None else Mixture(sizes, weights),
        )

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.num_samples / self.batch_size)

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole job; part of an epoch is rounded up to a whole step."""
        if self.max_steps is not None:
            return self.max_steps
        # 0.3 epochs of 10 steps are 3 steps, though in floating point the product can come out a hair above.
        return math.ceil(round(self.num_epochs * self.steps_per_epoch, 6))

    @property
    def num_trained_samples(self) -> int:
        num_epochs, rest = divmod(self.num_steps, self.steps_per_epoch)
        return num_epochs * self.num_samples + rest * self.batch_size

    def num_tokens(self, lengths: Sequence[int] | Integers) -> int:
        num_epochs, rest = divmod(self.num_steps, self.steps_per_epoch)
        each = np.asarray(lengths)
        if self.mixture is None:
            whole = num_epochs * int(each.sum())
        else:
            whole = int((each * self.mixture.met(num_epochs, self.seed, shuffle=self.shuffle)).sum())
        return whole + int(each[self._order(num_epochs)[: rest * self.batch_size]].sum()) if rest else whole

    def num_evals(self, eval_steps: int | None) -> int:
        """Evaluations of the whole job: every so many steps, after every epoch by default, and at its end."""
        return math.ceil(self.num_steps / (eval_steps or self.steps_per_epoch))

    def batch(self, step: int) -> Integers:
        """Sample indices of a step, counted from 0, in the job's own order."""
        assert 0 <= step < self.num_steps, f"step {step} is outside the schedule of {self.num_steps}"
        epoch, position = divmod(step, self.steps_per_epoch)
        return self._order(epoch)[position * self.batch_size : (position + 1) * self.batch_size]

    def _order(self, epoch: int) -> Integers:
        return epoch_order(self.num_samples, seed=self.seed, epoch=epoch, shuffle=self.shuffle, mixture=self.mixture)

    def epoch_of(self, step: int) -> float:
        return step / self.steps_per_epoch
