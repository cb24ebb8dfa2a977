"""Makes the API's objects of database rows: they are OpenAI's objects with further fields of our own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from fastapi import Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from weft.serve.db.engine import DbRow, Page
from weft.serve.db.workers import worker_state

Json = dict[str, Any]
HYPERPARAMETERS = ("n_epochs", "batch_size", "learning_rate_multiplier")


def file_object(row: DbRow) -> Json:
    shown = ("id", "bytes", "created_at", "expires_at", "filename", "purpose", "status", "status_details")
    return {"object": "file", **{name: row[name] for name in shown}, "sha256": row["sha256"]}


def upload_object(row: DbRow, file: DbRow | None = None) -> Json:
    """An Upload; `file` is the row of the completed file."""
    shown = ("id", "bytes", "created_at", "expires_at", "filename", "purpose", "status")
    return {"object": "upload", **{name: row[name] for name in shown}, "file": file and file_object(file)}


def part_object(row: DbRow) -> Json:
    return {"object": "upload.part", "id": row["id"], "created_at": row["created_at"], "upload_id": row["upload"]}


def job_object(row: DbRow) -> Json:
    """A FineTuningJob; `settings`, `priority`, `step` and `total_steps` are ours."""
    method = row["method"]
    used = method.get(method["type"], {}).get("hyperparameters") or {}
    same = (
        "id",
        "created_at",
        "estimated_finish",
        "finished_at",
        "fine_tuned_model",
        "status",
        "training_file",
        "validation_file",
        "result_files",
        "seed",
        "method",
        "integrations",
        "metadata",
        "error",
        "priority",
        "settings",
        "step",
        "total_steps",
        "started_at",
    )
    return {
        "object": "fine_tuning.job",
        **{name: row[name] for name in same},
        "model": row["settings"].get("init_adapter") or row["model"],
        "organization_id": row["tenant"],
        # OpenAI's type has these three; those of a method alone are in the method.
        "hyperparameters": {name: value for name, value in used.items() if name in HYPERPARAMETERS},
        "trained_tokens": row["trained_tokens"] if row["trained_tokens"] or row["status"] == "succeeded" else None,
        "user_provided_suffix": row["suffix"],
        "wanted": row["wanted"],
    }


def event_object(row: DbRow) -> Json:
    shown = ("id", "created_at", "level", "message", "type", "data")
    return {"object": "fine_tuning.job.event", **{name: row[name] for name in shown}}


def checkpoint_object(row: DbRow) -> Json:
    return {
        "object": "fine_tuning.job.checkpoint",
        "id": row["id"],
        "created_at": row["created_at"],
        "fine_tuning_job_id": row["job"],
        "fine_tuned_model_checkpoint": row["model"],
        "step_number": row["step"],
        "metrics": row["metrics"],
    }


def model_object(id: str, created: int, owner: str, **more: Any) -> Json:
    return {"object": "model", "id": id, "created": created, "owned_by": owner, **more}


def deleted(id: str, kind: str) -> Json:
    return {"id": id, "object": kind, "deleted": True}


def listed(page: Page, shape: Callable[[DbRow], Json], *, ends: bool = False) -> Json:
    """A page of a list; `ends` adds the ids of its first and last item."""
    items = [shape(row) for row in page.items]
    answer: Json = {"object": "list", "data": items, "has_more": page.has_more}
    if ends:
        first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
        answer |= {"first_id": first, "last_id": last}
    return answer


class EventStream(StreamingResponse):
    """Streams events, and calls `end` however the stream ends. A reader that goes away leaves the chunks half read:
    only here is that known, and no background task would run."""

    def __init__(
        self, chunks: Iterator[bytes], end: Callable[[], None], around: AbstractAsyncContextManager[object]
    ) -> None:
        super().__init__(chunks, media_type="text/event-stream", headers={"cache-control": "no-store"})
        self._end, self._around = end, around

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._around:
                await super().__call__(scope, receive, send)
        finally:
            self._end()


@asynccontextmanager
async def watched(watch: Callable[[], Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Runs `watch` beside the block, and no longer."""
    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()


WATCH_S = 0.2
"""How often an open connection is looked at."""


def event_stream(data: str, *, id: str | None = None) -> bytes:
    return (f"id: {id}\n" if id else "").encode() + f"data: {data}\n\n".encode()


def as_json(value: Json) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def ready(data: bytes) -> Response:
    """Makes an answer of encoded JSON, which FastAPI then neither checks nor copies."""
    return Response(data, media_type="application/json")


def worker_object(row: DbRow, held: Mapping[str, int], at: float) -> Json:
    """A worker with its machine and device; `held` counts the jobs of each worker, `at` is the database's time."""
    info = row["info"]
    return {
        "object": "worker",
        **{name: row[name] for name in ("id", "machine", "base_model", "started_at", "seen_at")},
        "device": info.get("device_name") or info.get("device"),
        "memory_bytes": info.get("memory_bytes"),
        "memory_total_bytes": info.get("memory_total_bytes"),
        "max_length": info.get("max_length"),
        "tokens_per_second": info.get("tokens_per_s"),
        "num_jobs": held.get(row["id"], 0),
        "state": worker_state(row, held.get(row["id"], 0), at),
    }
