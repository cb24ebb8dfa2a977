"""How the workers of one backbone share its jobs: who can hold which, how many each may claim, and who gives some back.

Where several workers are alive, none claims more than an equal part of all jobs, unless the others have no places for
the rest. So a queue is spread over the GPUs of all machines, whichever worker looks first. A job that is too long or
too large for one worker is left to another that can hold it, be it one that drains. A new job that nobody can hold is
claimed by anybody, and fails; one that has begun waits, because a worker that could hold it may come back.

A worker that comes later finds the others full. When nothing waits, one that has more than its part gives jobs back for
workers like itself with empty places, as many as make the numbers equal to within one. Nothing then makes a job move
again, and only workers with the same device and the same microbatches count, so that a move costs no bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from weft.serve.db.engine import Tx
from weft.serve.db.tables import JOBS
from weft.serve.records.rows import DbRow
from weft.serve.records.workers import held_by_worker, live_workers
from weft.spec import JobSpec

DEFAULT_LENGTH = next(field.default for field in dataclasses.fields(JobSpec) if field.name == "max_length")
"""The longest sample of a job that does not say."""
LENGTH = sa.func.coalesce(JOBS.c.settings["max_length"].as_integer(), DEFAULT_LENGTH).label("max_length")
"""The tokens of a job's longest sample, as a column of a query."""


@dataclass(frozen=True)
class WorkerLoad:
    """What a live worker can hold and holds."""

    id: str
    num_held: int = 0
    """Its jobs."""
    max_jobs: int | None = None
    """The most jobs it trains at a time; None is not known."""
    max_length: int | None = None
    """The most tokens of one sample; None is not known."""
    job_bytes: int | None = None
    """The bytes it has for the adapters and optimizers of jobs; None is no limit."""
    is_draining: bool = False
    """It claims no jobs at the moment."""
    kind: tuple[Any, ...] = ()
    """Workers of one kind give a job the same bits."""

    def can_hold(self, job: DbRow) -> bool:
        """Whether a job is neither too long nor, as far as is known, too large for this worker."""
        is_short = self.max_length is None or job["max_length"] <= self.max_length
        return is_short and self.has_bytes(job["min_job_bytes"])

    def has_bytes(self, num_bytes: int | None) -> bool:
        """Whether the worker has so many bytes for jobs."""
        return num_bytes is None or self.job_bytes is None or self.job_bytes >= num_bytes

    def num_short_of(self, part: int) -> int:
        """How many more jobs it would hold with an equal part."""
        return max(0, min(part, part if self.max_jobs is None else self.max_jobs) - self.num_held)


def loads_of(tx: Tx, worker: str, base_model: str) -> tuple[WorkerLoad, list[WorkerLoad]]:
    """Returns the load of a worker and of the others of this backbone that are alive."""
    held = held_by_worker(tx)
    rows = {row["id"]: row for row in live_workers(tx, base_model)}
    mine = _load(rows.pop(worker), held) if worker in rows else WorkerLoad(worker, held.get(worker, 0))
    return mine, [_load(row, held) for row in rows.values()]


def _load(row: DbRow, held: dict[str, int]) -> WorkerLoad:
    info = row["info"]
    return WorkerLoad(
        id=row["id"],
        num_held=held.get(row["id"], 0),
        max_jobs=info.get("max_jobs"),
        max_length=info.get("max_length"),
        job_bytes=info.get("job_bytes"),
        is_draining=row["is_draining"],
        kind=tuple(info.get(name) for name in ("device_name", "kernels", "capacity")),
    )


def is_for_another(job: DbRow, mine: WorkerLoad, others: Sequence[WorkerLoad]) -> bool:
    """Whether a job does not fit here but fits another worker that is alive, or has fitted one that was."""
    has_begun = job["started_at"] is not None
    return not mine.can_hold(job) and (has_begun or any(other.can_hold(job) for other in others))


def fair_room(mine: WorkerLoad, others: Sequence[WorkerLoad], num_places: int, free: Sequence[DbRow]) -> int:
    """Of a worker's free places, those it may fill now: what other live workers would take up to an equal part of all
    jobs is left to them, so that none is idle while another has more than its part."""
    others = [other for other in others if not other.is_draining]
    if not others or not free or num_places < 1:
        return num_places
    part = _part(mine, others, len(free))
    left = sum(min(other.num_short_of(part), sum(map(other.can_hold, free))) for other in others)
    return min(num_places, max(len(free) - left, part - mine.num_held, 0))


def num_to_give_back(mine: WorkerLoad, others: Sequence[WorkerLoad]) -> int:
    """How many jobs a worker has beyond its part for which workers of its kind have empty places.

    One that has no more than its part gives a job to a worker that has at least two fewer.
    """
    alike = [other for other in others if other.kind == mine.kind and not other.is_draining]
    part = _part(mine, alike, 0)
    beyond = min(mine.num_held - part, sum(other.num_short_of(part) for other in alike))
    roomy = [other for other in alike if other.num_short_of(mine.num_held)]
    return max(0, beyond, *(int(mine.num_held - other.num_held >= 2) for other in roomy))


def _part(mine: WorkerLoad, others: Sequence[WorkerLoad], num_free: int) -> int:
    """An equal part of all jobs, rounded up."""
    return -(-(num_free + mine.num_held + sum(other.num_held for other in others)) // (len(others) + 1))
