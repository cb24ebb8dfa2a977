"""/v1/fine_tuning/jobs/{id}/events: a page of a job's events, or all of them as they happen."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from weft.serve.api.jobs import After, Limit, User
from weft.serve.api.service import Service, service_of
from weft.serve.api.shapes import event_object, event_stream, listed
from weft.serve.errors import Busy
from weft.serve.jobs.states import FINAL
from weft.serve.records import events, jobs
from weft.serve.records.rows import Record

router = APIRouter(prefix="/v1/fine_tuning/jobs", tags=["Fine-tuning"])
POLL_S = 0.4
"""How often a stream looks for events; half of the second within which one should be seen."""
KEEP_ALIVE_S = 15.0


@router.get("/{job_id}/events", response_model=None)
def list_events(
    request: Request,
    user: User,
    job_id: str,
    after: After = None,
    limit: Limit = 20,
    stream: Annotated[bool, Query(description="Server-sent events, oldest first, until the job has ended.")] = False,
    last_event_id: Annotated[str | None, Header(max_length=64)] = None,
) -> dict[str, Any] | Response:
    """Events of a job, newest first; with `stream=true` as they happen."""
    request.state.log["job"] = job_id
    service = service_of(request)
    with service.database.read() as tx:
        jobs.get_job(tx, user.tenant, job_id)
        if not stream:
            return listed(events.list_events(tx, user.tenant, job_id, after, limit), event_object)
        start = after or last_event_id
        # Looking the id up here makes an unknown one a 404 instead of a stream that breaks off.
        seq = events.seq_of(tx, user.tenant, job_id, start) if start else 0
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(
        _follow(service, user.tenant, job_id, seq), media_type="text/event-stream", headers=headers
    )


async def _follow(service: Service, tenant: str, job_id: str, seq: int) -> AsyncIterator[bytes]:
    said = time.monotonic()
    while not service.is_draining:
        try:
            found, has_ended = await run_in_threadpool(_look, service, tenant, job_id, seq)
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
            continue
        if time.monotonic() - said > KEEP_ALIVE_S:
            said = time.monotonic()
            yield b": waiting\n\n"
        await asyncio.sleep(POLL_S)


def _look(service: Service, tenant: str, job_id: str, seq: int) -> tuple[list[Record], bool]:
    """New events, and whether there will be no more: the last event is written with the final state."""
    with service.database.read() as tx:
        found = events.events_since(tx, tenant, job_id, seq)
        return found, jobs.get_job(tx, tenant, job_id)["status"] in FINAL
