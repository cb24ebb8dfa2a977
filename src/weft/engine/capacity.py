"""How many tokens a microbatch may hold, and what becomes of that when the memory runs out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weft.engine.execute.protocol import Executor
from weft.engine.jobs.live_job import LiveJob
from weft.engine.jobs.placement import Placement
from weft.errors import ConfigError
from weft.job_state import Reason, ReasonCode
from weft.plan.types import Limits
from weft.spec.run import Capacity

OUT_OF_MEMORY = (
    "the GPU ran out of memory at a capacity of {before} tokens; its jobs go on from their last step with {now}, which "
    "other runs on this GPU can start with (capacity: {now})."
)
"""What a user is told when microbatches get smaller."""
SMALLER = (
    "microbatches of {before} tokens would leave no memory for {whom} on this GPU; they hold at most {now} instead "
    "(capacity: {now})."
)
"""What a user is told when microbatches are made smaller before any has run."""
NO_ROOM = Reason(
    ReasonCode.DOES_NOT_FIT,
    "the GPU has no memory for its adapter, even alone; lower adapter.r or capacity, or quantize the backbone.",
)
"""Why a job fails that does not even fit alone."""


def refuse_empty(capacity: Capacity, max_jobs: int | None) -> None:
    """ConfigError for limits of an engine that would hold nothing."""
    if capacity != "auto" and capacity < 2:
        raise ConfigError(f"got {capacity}; accepted is auto or at least 2 tokens.", where="Engine capacity")
    if max_jobs is not None and max_jobs < 1:
        raise ConfigError(f"got {max_jobs}; accepted is at least 1.", where="Engine max_jobs")


class CapacityLimit:
    """The most tokens that a microbatch may hold: as many as were asked for, or fewer once the memory has run out."""

    def __init__(self, executor: Executor, allowed: Sequence[int], jobs: Mapping[str, LiveJob]) -> None:
        """`allowed`: what was asked for, and what may be taken instead to have microbatches full rather than large.

        `jobs`: those of the engine, as they come and go.
        """
        self.asked, self._least_allowed = allowed[0], allowed[-1]
        self.limits = Limits(self.asked)
        self.row_tile = executor.row_tile(self.asked)
        self._executor = executor
        self._jobs = jobs

    @property
    def capacity(self) -> int:
        """Most tokens of a microbatch now."""
        return self.limits.capacity

    def conditions(self) -> dict[str, Any]:
        """What of it decides the bits of a result."""
        return {"capacity": self.capacity, "row_tile": self.row_tile, "kernels": self._executor.facts.path}

    def fit(self, places: Placement) -> str | None:
        """Shrinks until at least one of the jobs that wait fits, if one ever can, or, as far as that is allowed, until
        they can fill a microbatch. What a user is to be told, if it did.
        """
        before, whom = self.capacity, "a job"
        if not places.fits_any_waiting(self.least()):
            return None
        while not places.fits_any_waiting(self.capacity) and self.shrink():
            pass
        while self.capacity > self._least_allowed and not places.can_fill(self.capacity) and self.shrink():
            whom = "enough jobs to fill them"
        return None if self.capacity == before else SMALLER.format(before=before, now=self.capacity, whom=whom)

    def shrink(self) -> bool:
        """Halves the capacity, but not below the longest sample of any job that has not ended; False if it cannot."""
        return self._set(max(self.capacity // 2, self.least()))

    def least(self, longest: int = 0) -> int:
        """The smallest capacity it can shrink to, with a job whose longest sample has so many tokens."""
        return max(self._longest(), longest, 2)

    def adopt(self, asked: int | None, capacity: int | None) -> bool:
        """Goes on with the capacity that a run was left with; False if that is no smaller."""
        if asked != self.asked or capacity is None:
            return False
        return self._set(max(capacity, self._longest()))

    def holders(self) -> list[LiveJob]:
        """The jobs whose longest sample fills a whole microbatch, so that it cannot shrink."""
        return [job for job in self._alive() if job.longest >= self.capacity]

    def _alive(self) -> list[LiveJob]:
        # A copy at once: other threads may submit while we look.
        return [job for job in list(self._jobs.values()) if job.is_alive]

    def _longest(self) -> int:
        return max((job.longest for job in self._alive()), default=0)

    def _set(self, capacity: int) -> bool:
        if capacity >= self.capacity:
            return False
        self.limits = Limits(capacity)
        self.row_tile = self._executor.row_tile(capacity)
        return True


def too_long(tokens: int) -> Reason:
    """Why a job fails when microbatches cannot get smaller for the sake of its longest sample."""
    return Reason(
        ReasonCode.SAMPLE_TOO_LONG,
        f"too long for this GPU: a microbatch of {tokens} tokens, as its longest sample needs, ran out of memory; "
        "lower max_length, set recompute: full, or quantize the backbone.",
    )
