"""/v1/fine_tuning/jobs/{id}/events: a page of a job's events, or all of them as they happen."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import StreamingResponse

from weft.job_state import FINAL_STATES
from weft.serve.api.auth import JobsUser
from weft.serve.api.responses import as_json, event_object, event_stream, listed, ready
from weft.serve.api.routes.jobs import PageCursor, PageLimit
from weft.serve.api.service import ApiService, service_of
from weft.serve.db.engine import Tx
from weft.serve.errors import Busy
from weft.serve.records import events, jobs
from weft.serve.records.rows import DbRow

router = APIRouter(prefix="/v1/fine_tuning/jobs", tags=["Fine-tuning"])
POLL_S = 0.2
"""How often a stream looks for new events; this costs next to nothing while there are none."""
KEEP_ALIVE_S = 15.0
MOST = 50
"""How many events are read at a time, so that a long history does not hold up other requests."""


@router.get("/{job_id}/events", response_model=None)
async def list_events(
    request: Request,
    user: JobsUser,
    job_id: str,
    after: PageCursor = None,
    limit: PageLimit = 20,
    stream: Annotated[bool, Query(description="Server-sent events, oldest first, until the job has ended.")] = False,
    last_event_id: Annotated[str | None, Header(max_length=64)] = None,
) -> Response:
    """Events of a job, newest first; with `stream=true` as they happen."""
    request.state.log["job"] = job_id
    service = service_of(request)
    start = after or last_event_id

    def page(tx: Tx) -> bytes:
        jobs.get_job(tx, user.tenant, job_id)
        return as_json(listed(events.list_events(tx, user.tenant, job_id, after, limit), event_object))

    def place(tx: Tx) -> int:
        jobs.get_job(tx, user.tenant, job_id)
        # The id is looked up here so that an unknown one is a 404 and not a stream that breaks off.
        return events.seq_of(tx, user.tenant, job_id, start) if start else 0

    if not stream:
        return ready(await service.read_cache.read(("events", user.tenant, job_id, after, limit), page))
    seq = await service.read_cache.read(("place", user.tenant, job_id, start), place)
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(
        _follow(service, user.tenant, job_id, seq), media_type="text/event-stream", headers=headers
    )


async def _follow(service: ApiService, tenant: str, job_id: str, seq: int) -> AsyncIterator[bytes]:
    said = time.monotonic()

    def look(tx: Tx) -> tuple[list[DbRow], bool]:
        # The last event is written with the final state.
        is_over = jobs.get_job(tx, tenant, job_id)["status"] in FINAL_STATES
        return events.events_since(tx, tenant, job_id, seq, MOST), is_over

    while not service.is_draining:
        try:
            found, has_ended = await service.read_cache.read(("events since", tenant, job_id, seq), look)
        except Busy:
            found, has_ended = [], False
        for event in found:
            seq = event["seq"]
            yield event_stream(json.dumps(event_object(event)), id=event["id"])
        if has_ended and not found:
            yield event_stream("[DONE]")
            return
        if found:
            said = time.monotonic()
            # Otherwise a client that takes events as fast as they come would keep everybody else waiting.
            await asyncio.sleep(0)
            continue
        if time.monotonic() - said > KEEP_ALIVE_S:
            said = time.monotonic()
            yield b": waiting\n\n"
        await asyncio.sleep(POLL_S)
