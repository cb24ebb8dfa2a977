"""The order in which a job meets its samples: a pure function of the job's seed, so a resumed job meets the same."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.spec import JobSpec


def permutation(num_items: int, entropy: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """The numbers 0 to num_items - 1 in an order drawn from `entropy`.

    Sorts raw random bits: numpy keeps those the same from version to version, but not `Generator.permutation`.
    """
    keys = np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(num_items)
    return np.argsort(keys, kind="stable").astype(np.int64)


@functools.lru_cache(maxsize=64)
def epoch_order(num_samples: int, *, seed: int, epoch: int, shuffle: bool) -> npt.NDArray[np.int64]:
    """Sample indices in the order of one epoch (counted from 0); the array is read-only."""
    order = permutation(num_samples, (seed, epoch)) if shuffle else np.arange(num_samples, dtype=np.int64)
    order.setflags(write=False)
    return order


@dataclass(frozen=True)
class BatchSchedule:
    """Which samples form the global batch of each optimizer step of a job.

    A batch never crosses epochs; the last one of an epoch may be smaller.
    """

    num_samples: int
    batch_size: int
    num_epochs: float
    max_steps: int | None
    """Number of steps whatever num_epochs says."""
    seed: int
    shuffle: bool

    @classmethod
    def of(cls, job: JobSpec, num_samples: int) -> BatchSchedule:
        """The schedule of a job with so many training samples."""
        return cls(
            num_samples=num_samples,
            batch_size=job.batch_size,
            num_epochs=job.num_train_epochs,
            max_steps=job.max_steps,
            seed=job.seed,
            shuffle=job.shuffle,
        )

    @property
    def steps_per_epoch(self) -> int:
        """Batches it takes to meet every sample once."""
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
        """Samples of all steps together; one counts as often as it is met."""
        num_epochs, rest = divmod(self.num_steps, self.steps_per_epoch)
        return num_epochs * self.num_samples + min(self.num_samples, rest * self.batch_size)

    def num_tokens(self, lengths: Sequence[int] | npt.NDArray[np.int64]) -> int:
        """Tokens of the whole job, whose samples have these lengths."""
        num_epochs, rest = divmod(self.num_steps, self.steps_per_epoch)
        each = np.asarray(lengths)
        whole = num_epochs * int(each.sum())
        if not rest:
            return whole
        begun = epoch_order(self.num_samples, seed=self.seed, epoch=num_epochs, shuffle=self.shuffle)
        return whole + int(each[begun[: rest * self.batch_size]].sum())

    def num_evals(self, eval_steps: int | None) -> int:
        """Evaluations of the whole job: every so many steps, unless given after every epoch, and at its end."""
        return math.ceil(self.num_steps / (eval_steps or self.steps_per_epoch))

    def batch(self, step: int) -> npt.NDArray[np.int64]:
        """Sample indices of a step, counted from 0, in the job's own order."""
        assert 0 <= step < self.num_steps, f"step {step} is outside the schedule of {self.num_steps}"
        epoch, position = divmod(step, self.steps_per_epoch)
        order = epoch_order(self.num_samples, seed=self.seed, epoch=epoch, shuffle=self.shuffle)
        return order[position * self.batch_size : (position + 1) * self.batch_size]

    def epoch_of(self, step: int) -> float:
        """Epochs done when `step` steps are done."""
        return step / self.steps_per_epoch
