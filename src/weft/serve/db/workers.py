"""The rows of workers, and how the workers of one backbone share its jobs.

Where several workers are alive, none claims more than an equal part of all jobs, unless the others have no room for
the rest. So a queue is spread over the GPUs of all machines, whichever worker looks first. A job that is too long or
too large for one worker is left to another that can hold it, even to one that drains. A new job that no worker can hold
is claimed by any of them, and fails; one that has begun waits, because a worker that could hold it may come back.

A worker that comes later finds the others full. When nothing waits, one that has more than its part gives jobs back for
workers like itself with room, as many as make the numbers equal to within one. After that no job moves again. Only
workers with the same device and the same microbatches count, so that a move changes no bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from weft.serve.db.engine import DbRow, Tx, every, first, now
from weft.serve.db.tables import JOBS, WORKERS
from weft.spec import JobSpec

ALIVE_S = 30.0
"""Seconds of silence after which a worker counts as lost, if its row has no limit of its own."""
HUNG_S = 30.0
"""Seconds of silence of a worker's training thread after which the worker gets no prompts."""
SILENT_FIELD = "trainer_silent_s"
"""The name of that silence in `info`."""
FORGOTTEN_S = 24 * 3600.0
"""How long operators see a worker that is lost."""


def put_worker(
    tx: Tx,
    id: str,
    *,
    base_model: str,
    address: str | None,
    token: str | None,
    info: Mapping[str, Any],
    is_draining: bool = False,
    machine: str | None = None,
    lease_s: float = ALIVE_S,
) -> None:
    """Adds or updates a worker's row, and notes that the worker is alive now and for `lease_s` without another word.
    What the operator wants of the worker stays as it is."""
    at = now(tx)
    values = {
        "base_model": base_model,
        "address": address,
        "token": token,
        "seen_at": at,
        "is_draining": is_draining,
        "info": dict(info),
        "machine": machine,
        "lease_s": lease_s,
    }
    if tx.execute(sa.update(WORKERS).where(WORKERS.c.id == id).values(values)).rowcount == 0:
        tx.execute(sa.insert(WORKERS).values({"id": id, "started_at": int(at), **values}))


def wanted_of(tx: Tx, id: str) -> str | None:
    wanted = tx.execute(sa.select(WORKERS.c.wanted).where(WORKERS.c.id == id)).scalar_one_or_none()
    return None if wanted is None else str(wanted)


def is_lost(row: DbRow, at: float) -> bool:
    """Whether a worker has been silent for longer than it may be."""
    return bool(row["seen_at"] + (row["lease_s"] or ALIVE_S) <= at)


def is_hung(row: DbRow) -> bool:
    """Whether the thread that trains and answers prompts was silent for long when the worker last wrote its row."""
    return float(row["info"].get(SILENT_FIELD) or 0) > HUNG_S


def remove_worker(tx: Tx, id: str) -> None:
    tx.execute(sa.delete(WORKERS).where(WORKERS.c.id == id))


def forget_lost_workers(tx: Tx) -> None:
    """Removes the rows of workers that have been lost for a day; operators no longer need them."""
    tx.execute(sa.delete(WORKERS).where(WORKERS.c.seen_at < now(tx) - FORGOTTEN_S))


def find_worker(tx: Tx, id: str) -> DbRow | None:
    return first(tx, sa.select(WORKERS).where(WORKERS.c.id == id))


def live_workers(tx: Tx, base_model: str | None = None) -> list[DbRow]:
    """Lists the workers that are alive, the one seen last first; of one backbone or of all."""
    alive = WORKERS.c.seen_at + sa.func.coalesce(WORKERS.c.lease_s, ALIVE_S) > now(tx)
    query = sa.select(WORKERS).where(alive).order_by(WORKERS.c.seen_at.desc())
    return every(tx, query.where(WORKERS.c.base_model == base_model) if base_model else query)


def all_workers(tx: Tx) -> list[DbRow]:
    return every(tx, sa.select(WORKERS).order_by(WORKERS.c.machine, WORKERS.c.started_at, WORKERS.c.id))


def held_by_worker(tx: Tx) -> dict[str, int]:
    counted = sa.select(JOBS.c.worker, sa.func.count()).where(
        JOBS.c.status.in_(("queued", "running")), JOBS.c.lease_until > now(tx)
    )
    return {str(worker): int(number) for worker, number in tx.execute(counted.group_by(JOBS.c.worker))}


def worker_state(row: DbRow, num_held: int, at: float) -> str:
    if is_lost(row, at):
        return "lost"
    if row["wanted"] == "drain":
        return "draining" if num_held else "drained"
    return "leaving" if row["is_draining"] or row["wanted"] == "remove" else "alive"


DEFAULT_LENGTH = next(field.default for field in dataclasses.fields(JobSpec) if field.name == "max_length")
"""The longest sample of a job that does not state it."""
LENGTH = sa.func.coalesce(JOBS.c.settings["max_length"].as_integer(), DEFAULT_LENGTH).label("max_length")
"""The tokens of a job's longest sample, as a column of a query."""


@dataclass(frozen=True)
class WorkerLoad:
    id: str
    num_held: int = 0
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


def fair_room(mine: WorkerLoad, others: Sequence[WorkerLoad], num_seats: int, free: Sequence[DbRow]) -> int:
    """Of a worker's free seats, those it may fill now: what other live workers would take up to an equal part of all
    jobs is left to them, so that none is idle while another has more than its part."""
    others = [other for other in others if not other.is_draining]
    if not others or not free or num_seats < 1:
        return num_seats
    part = _part(mine, others, len(free))
    left = sum(min(other.num_short_of(part), sum(map(other.can_hold, free))) for other in others)
    return min(num_seats, max(len(free) - left, part - mine.num_held, 0))


def num_to_give_back(mine: WorkerLoad, others: Sequence[WorkerLoad]) -> int:
    """How many jobs a worker has beyond its part for which workers of its kind have empty seats. One that has no more
    than its part gives a job to a worker that has at least two fewer."""
    alike = [other for other in others if other.kind == mine.kind and not other.is_draining]
    part = _part(mine, alike, 0)
    beyond = min(mine.num_held - part, sum(other.num_short_of(part) for other in alike))
    roomy = [other for other in alike if other.num_short_of(mine.num_held)]
    return max(0, beyond, *(int(mine.num_held - other.num_held >= 2) for other in roomy))


def _part(mine: WorkerLoad, others: Sequence[WorkerLoad], num_free: int) -> int:
    return -(-(num_free + mine.num_held + sum(other.num_held for other in others)) // (len(others) + 1))
