"""Decides when a worker gives jobs back because another of its kind has empty places, and which.

A move costs a save, a fetch and the preparation of the data, so jobs stay where they are unless it pays: the numbers
must have been unequal for `SETTLE_S`, only jobs with `WORTH_S` still to go are moved, those with the most first, and
after a move a worker keeps the rest for `REST_S`. While jobs wait in the queue, nobody gives any back.
"""

from __future__ import annotations

from collections.abc import Iterable

from weft.serve.db.engine import Tx
from weft.serve.jobs.leases import SUSPECT_AFTER, has_free
from weft.serve.jobs.sharing import loads_of, num_to_give_back
from weft.serve.records.rows import DbRow

SETTLE_S = 10.0
"""How long the numbers must have been unequal: a worker that has just started may still be claiming."""
WORTH_S = 60.0
"""The least time that a job must still have to go, by its estimate."""
REST_S = 60.0
"""How long a worker that has given jobs back keeps the others."""
LOOK_S = 2.0
"""The time between two looks at the other workers."""


class Rebalance:
    """What one worker remembers of the balance. All times are by the database's clock."""

    def __init__(self) -> None:
        self._unequal_since: float | None = None
        self._look_at = 0.0

    def choose(self, tx: Tx, worker: str, base_model: str, jobs: Iterable[DbRow], at: float) -> list[str]:
        """Returns the ids of those of the worker's jobs that it should give back now."""
        if at < self._look_at:
            return []
        self._look_at = at + LOOK_S
        number = 0 if has_free(tx, base_model) else num_to_give_back(*loads_of(tx, worker, base_model))
        if number == 0:
            self._unequal_since = None
            return []
        if self._unequal_since is None:
            self._unequal_since = at
        if at - self._unequal_since < SETTLE_S:
            return []
        movable = [job for job in jobs if _is_worth_moving(job, at)]
        return [job["id"] for job in sorted(movable, key=lambda job: (-job["estimated_finish"], job["seq"]))[:number]]

    def rest(self, at: float) -> None:
        """Notes that jobs have been given back."""
        self._unequal_since, self._look_at = None, at + REST_S


def _is_worth_moving(job: DbRow, at: float) -> bool:
    if job["status"] != "running" or job["wanted"] is not None or job["attempts"] >= SUSPECT_AFTER:
        return False
    return job["estimated_finish"] is not None and job["estimated_finish"] - at >= WORTH_S
