"""What the dashboard shows beyond the public routes: workers, the queue, usage by month, and all tenants for operators.

A tenant sees the workers it shares, and of other tenants' jobs on them only that they are there and how many tokens
they take. An operator (scope `admin`) sees whose they are, the names of the machines, and which workers are lost.
"""

from __future__ import annotations

import datetime
import itertools
import threading
import time
from collections import Counter, deque
from typing import Any

import sqlalchemy as sa

from weft.job_state import FINAL_STATES
from weft.serve.api.responses import Json
from weft.serve.db import files, tenants, usage
from weft.serve.db.engine import Database, DbRow, Tx, every, now
from weft.serve.db.tables import FILES, JOBS, MODELS
from weft.serve.db.usage import token_usage
from weft.serve.db.workers import all_workers, held_by_worker, live_workers, worker_state

_SHORT = 6
"""How many letters of a worker's id people see."""


def workers_view(tx: Tx, tenant: str, *, sees_all: bool) -> list[Json]:
    """Returns the live workers as a tenant may see them. With `sees_all` everybody's jobs are named, and machines;
    workers that are lost are there too."""
    workers = all_workers(tx) if sees_all else live_workers(tx)
    held, at = held_by_worker(tx), now(tx)
    ids = {id for worker in workers for id in _ids(worker["info"])}
    rows = every(tx, sa.select(JOBS.c.id, JOBS.c.tenant, JOBS.c.suffix).where(JOBS.c.id.in_(sorted(ids))))
    names = {row["id"]: row["suffix"] or row["id"] for row in rows if sees_all or row["tenant"] == tenant}
    mine = {row["id"] for row in rows if tenant == row["tenant"]}
    views = []
    for worker in sorted(workers, key=lambda worker: (worker["machine"] or "", worker["started_at"], worker["id"])):
        state = worker_state(worker, held.get(worker["id"], 0), at)
        machine = worker["machine"] if sees_all else None
        views.append({**_worker_view(worker, names, mine), "machine": machine, "state": state})
    return views


def _ids(info: Json) -> set[str]:
    """Returns the jobs a worker reports: those it holds, and those of its last steps."""
    recent = {id for span in info.get("program", ()) for id in span.get("jobs") or ()}
    return recent | {job["id"] for job in info.get("jobs", ())}


def _worker_view(worker: DbRow, names: dict[str, str], mine: set[str]) -> Json:
    info = worker["info"]
    jobs = [job["id"] for job in info.get("jobs", ()) if job.get("state") not in FINAL_STATES]
    return {
        "id": worker["id"],
        "name": f"worker {worker['id'][-_SHORT:]}",
        "base_model": worker["base_model"],
        "device": info.get("device_name") or info.get("device"),
        "started_at": worker["started_at"],
        "seen_at": worker["seen_at"],
        "memory_bytes": info.get("memory_bytes"),
        "memory_total_bytes": info.get("memory_total_bytes"),
        "max_length": info.get("max_length"),
        "max_jobs": info.get("max_jobs"),
        "tokens_per_second": info.get("tokens_per_s"),
        "time": info.get("time"),
        "jobs": [{"id": id, "name": names[id], "is_mine": id in mine} for id in jobs if id in names],
        "num_other_jobs": sum(id not in names for id in jobs),
        "names": {id: names[id] for id in sorted(_ids(info)) if id in names},
        "program": [_span_view(span, names, info.get("capacity")) for span in info.get("program", ())],
    }


def _span_view(span: Json, names: dict[str, str], capacity: int | None) -> Json:
    """Returns one span of the program; the tokens of jobs that may not be named are added up under ""."""
    tokens: dict[str, int] = {}
    for id, number in (span.get("jobs") or {}).items():
        known = id if id in names else ""
        tokens[known] = tokens.get(known, 0) + number
    return {
        "name": span.get("name", ""),
        "start": span.get("start_s", 0.0),
        "seconds": span.get("duration_s", 0.0),
        "tokens": tokens,
        "capacity": capacity,
    }


def queues(tx: Tx, tenant: str | None) -> dict[str, Json]:
    """Counts the jobs by state and the trained tokens of one tenant, or of every tenant if `tenant` is None."""
    query = sa.select(
        JOBS.c.tenant, JOBS.c.status, sa.func.count().label("num"), sa.func.sum(JOBS.c.trained_tokens).label("tokens")
    ).group_by(JOBS.c.tenant, JOBS.c.status)
    found: dict[str, Json] = {}
    for row in every(tx, query if tenant is None else query.where(JOBS.c.tenant == tenant)):
        mine = found.setdefault(row["tenant"], {"queue": {}, "trained_tokens": 0})
        mine["queue"][row["status"]] = int(row["num"])
        mine["trained_tokens"] += int(row["tokens"] or 0)
    return found


def total_queue(by_tenant: dict[str, Json]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in by_tenant.values():
        total.update(one["queue"])
    return dict(total)


def tenants_view(tx: Tx, by_tenant: dict[str, Json]) -> list[Json]:
    stored: dict[str, int] = {}
    for table in (FILES, MODELS):
        query = sa.select(table.c.tenant, sa.func.sum(table.c.bytes).label("bytes")).where(table.c.deleted_at.is_(None))
        for row in every(tx, query.group_by(table.c.tenant)):
            stored[row["tenant"]] = stored.get(row["tenant"], 0) + int(row["bytes"])
    views = []
    for row in tenants.list_tenants(tx):
        mine = by_tenant.get(row["id"], {"queue": {}, "trained_tokens": 0})
        active = sum(number for state, number in mine["queue"].items() if state not in FINAL_STATES)
        shown = {name: row[name] for name in ("id", "name", "is_disabled", "weight")}
        views.append({**shown, **mine, "num_active_jobs": active, "stored_bytes": stored.get(row["id"], 0)})
    return views


def usage_view(tx: Tx, tenant: str, months: int, at: float) -> Json:
    """Returns a tenant's tokens in total and in each of the last months (UTC), oldest first, and its stored bytes."""
    bounds = month_starts(at, months)
    totals = [usage.usage_of(tx, tenant, start=start, end=end)["totals"] for start, end in bounds]
    return {
        "totals": usage.usage_of(tx, tenant)["totals"],
        "reserved_tokens": token_usage(tx, tenant).reserved,
        "stored_bytes": files.stored_bytes(tx, tenant),
        "months": [{"start": start, **total} for (start, _), total in zip(bounds, totals, strict=True)],
    }


def month_starts(at: float, months: int) -> list[tuple[int, int]]:
    """Returns the begin and end of the last `months` months, oldest first, including the current one."""
    today = datetime.datetime.fromtimestamp(at, datetime.UTC)
    index = today.year * 12 + today.month - 1
    starts = [
        int(datetime.datetime(i // 12, i % 12 + 1, 1, tzinfo=datetime.UTC).timestamp())
        for i in range(index - months + 1, index + 2)
    ]
    return list(itertools.pairwise(starts))


SAMPLE_S = 5.0
"""The time between two points; a worker reports about once a second."""
NUM_POINTS = 720
"""How many points of one worker are kept: an hour's worth."""

HistoryPoint = dict[str, Any]


class History:
    """The points of each worker, oldest first. Threads may share it."""

    def __init__(self) -> None:
        self._points: dict[str, deque[HistoryPoint]] = {}
        self._due = 0.0
        self._lock = threading.Lock()

    def sample(self, database: Database) -> None:
        """Takes a point of every live worker, unless the last one was taken less than SAMPLE_S ago."""
        with self._lock:
            if time.monotonic() < self._due:
                return
            self._due = time.monotonic() + SAMPLE_S
        with database.read() as tx:
            workers = live_workers(tx)
        self.add(workers)

    def add(self, workers: list[DbRow]) -> None:
        """Appends a point of each worker that reported again, and forgets workers that were silent for an hour."""
        with self._lock:
            for worker in workers:
                points = self._points.setdefault(worker["id"], deque(maxlen=NUM_POINTS))
                if points and points[-1]["at"] >= worker["seen_at"]:
                    continue
                info = worker["info"]
                speed, memory = info.get("tokens_per_s"), info.get("memory_bytes")
                points.append({"at": worker["seen_at"], "tokens_per_second": speed, "memory_bytes": memory})
            newest = max((points[-1]["at"] for points in self._points.values()), default=0.0)
            oldest = newest - SAMPLE_S * NUM_POINTS
            self._points = {id: points for id, points in self._points.items() if points[-1]["at"] > oldest}

    def points(self) -> dict[str, list[HistoryPoint]]:
        with self._lock:
            return {id: list(points) for id, points in self._points.items()}
