"""What dispatch returns: how many samples of each bucket every replica runs, and which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.errors import PlanError
from weft.plan.bucket import Buckets


@dataclass(frozen=True)
class Dispatch:
    """One batch, shared out."""

    counts: tuple[tuple[int, ...], ...]
    """Samples by replica and bucket."""
    seconds: tuple[float, ...]
    """Predicted, by replica."""
    bound_s: float
    """No dispatch over these replicas takes less."""
    homes: tuple[int, ...] = ()
    """The replica of each job that has one, by its place; its samples are among the counts."""

    @property
    def step_s(self) -> float:
        """When the last replica ends."""
        return max(self.seconds)

    @property
    def gap(self) -> float:
        """At most so much longer than the best possible, as a share of it."""
        return self.step_s / self.bound_s - 1.0

    def assign(self, lengths: Sequence[int], buckets: Buckets) -> list[list[int]]:
        """The samples of every replica by their place in the batch, all of which may be shared out.

        Samples of one bucket are dealt out from the longest to the shortest, each to the replica that has the smallest
        part of its share so far, so that replicas get alike samples.
        """
        assert not self.homes, "who has which samples of a job with a home is no question"
        waiting: list[list[int]] = [[] for _ in buckets.bounds]
        for sample, bucket in enumerate(buckets.place_of(lengths)):
            waiting[bucket].append(sample)
        replicas: list[list[int]] = [[] for _ in self.counts]
        for bucket, samples in enumerate(waiting):
            shares = [(own[bucket], replica) for replica, own in enumerate(self.counts) if own[bucket]]
            if sum(share for share, _ in shares) != len(samples):
                raise PlanError(
                    f"bucket {bucket} has {len(samples)} samples; {sum(share for share, _ in shares)} are dispatched.",
                    where="dispatch",
                )
            turns = sorted(((turn + 0.5) / share, replica) for share, replica in shares for turn in range(share))
            samples.sort(key=lambda sample: (-lengths[sample], sample))
            for sample, (_, replica) in zip(samples, turns, strict=True):
                replicas[replica].append(sample)
        return [sorted(own) for own in replicas]
