"""/v1/fine_tuning/jobs: create jobs, look at them, cancel, pause and resume them, and follow their events."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import json
import re
import time
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from weft.errors import ConfigError
from weft.job_state import FINAL_STATES
from weft.serve import new_job
from weft.serve.api.errors import invalid
from weft.serve.api.requests import CreateJob, body_of, documented
from weft.serve.api.responses import (
    as_json,
    checkpoint_object,
    event_object,
    event_stream,
    job_object,
    listed,
    ready,
)
from weft.serve.api.service import ApiService, Caller, JobsUser, resolve_model, service_of
from weft.serve.api.stored_files import find_training_file, refuse_problems
from weft.serve.db import files, jobs, tenants, usage
from weft.serve.db.engine import DbRow, Tx, new_id
from weft.serve.errors import Busy, NotFound, NotPossible, OverLimit
from weft.serve.new_job import check_training_file
from weft.settings import describe
from weft.spec import JobSpec
from weft.spec.choices import resolve

job_router = APIRouter(prefix="/v1/fine_tuning/jobs", tags=["Fine-tuning"])
PageCursor = Annotated[str | None, Query(max_length=64)]
PageLimit = Annotated[int, Query(ge=1, le=100)]
DEFAULT_SEED = 42
DEFAULT_LIMIT = 20
MAX_CHECKED = 10_000
"""For how many files the service remembers that they can be trained on."""
_METADATA = re.compile(r"metadata\[(.+)\]", re.DOTALL)


@job_router.post("", openapi_extra=documented(CreateJob))
async def create(
    request: Request,
    user: JobsUser,
    body: Annotated[CreateJob, Depends(body_of(CreateJob))],
    idempotency_key: Annotated[str | None, Header(max_length=255)] = None,
) -> dict[str, Any]:
    """Starts a job. With an `Idempotency-Key` header the same request can be sent again and makes one job."""
    row = await run_in_threadpool(_create, service_of(request), user, body, idempotency_key)
    request.state.log["job"] = row["id"]
    return job_object(row)


@job_router.get("", response_model=dict[str, Any])
async def list_jobs(
    request: Request, user: JobsUser, after: PageCursor = None, limit: PageLimit = DEFAULT_LIMIT
) -> Response:
    """Jobs, newest first; `metadata[key]=value` selects, `metadata=null` selects those without."""
    wanted = {m[1]: value for name, value in request.query_params.items() if (m := _METADATA.fullmatch(name))}
    if any('"' in key or "\\" in key for key in wanted) or len(wanted) > 16:
        raise invalid("At most 16 keys, without quotes and backslashes.", "metadata", "invalid_value")
    none = request.query_params.get("metadata")
    if none not in (None, "null"):
        accepted = "use metadata[key]=value, or null for jobs without"
        message = f"Invalid value for 'metadata': got {describe(none)}; {accepted}."
        raise invalid(message, "metadata", "invalid_value")

    def look(tx: Tx) -> bytes:
        page = jobs.list_jobs(tx, user.tenant, after, limit, metadata=wanted, no_metadata=none is not None)
        return as_json(listed(page, job_object))

    # Jobs with the wanted metadata may be anywhere in a long list, so that search may take long.
    key = ("jobs", user.tenant, after, limit) if not wanted and none is None else None
    is_polled = after is None and limit == DEFAULT_LIMIT
    watched = jobs.watched_newest_jobs(user.tenant, limit) if is_polled else None
    return ready(await service_of(request).read_cache.read(key, look, watched))


@job_router.get("/{job_id}", response_model=dict[str, Any])
async def retrieve(request: Request, user: JobsUser, job_id: str) -> Response:
    """One job."""

    def look(tx: Tx) -> bytes:
        return as_json(job_object(jobs.get_job(tx, user.tenant, job_id)))

    watched = jobs.watched_job(user.tenant, job_id)
    return ready(await service_of(request).read_cache.read(("job", user.tenant, job_id), look, watched))


@job_router.post("/{job_id}/cancel")
def cancel(request: Request, user: JobsUser, job_id: str) -> dict[str, Any]:
    """Stops a job for good, at its next step if it is training."""
    return _change(request, user, job_id, "cancel")


@job_router.post("/{job_id}/pause")
def pause(request: Request, user: JobsUser, job_id: str) -> dict[str, Any]:
    """Stops a job so that it can go on later, at its next step if it is training."""
    return _change(request, user, job_id, "pause")


@job_router.post("/{job_id}/resume")
def resume(request: Request, user: JobsUser, job_id: str) -> dict[str, Any]:
    """Lets a paused job go on where it was."""
    return _change(request, user, job_id, "resume")


@job_router.get("/{job_id}/checkpoints")
def list_checkpoints(
    request: Request, user: JobsUser, job_id: str, after: PageCursor = None, limit: PageLimit = 10
) -> dict[str, Any]:
    """Checkpoints of a job, newest first."""
    with service_of(request).database.read() as tx:
        jobs.get_job(tx, user.tenant, job_id)
        page = files.list_checkpoints(tx, user.tenant, job_id, after, limit)
    return listed(page, checkpoint_object, ends=True)


def _change(request: Request, user: Caller, job_id: str, wish: str) -> dict[str, Any]:
    request.state.log["job"] = job_id
    with service_of(request).database.begin() as tx:
        row = jobs.request_change(tx, user.tenant, job_id, wish)
        user.note(tx, f"job.{wish}", job_id)
    return job_object(row)


def _create(service: ApiService, user: Caller, body: CreateJob, key: str | None) -> DbRow:
    """Makes the job of a request, or finds the one that the same request made before."""
    if not service.settings.training:
        raise NotPossible("This server answers prompts only; it was started with --no-training.")
    digest = hashlib.sha256(json.dumps(body.model_dump(), sort_keys=True).encode()).hexdigest()
    if key is not None:
        with service.database.read() as tx:
            earlier = tenants.find_key_use(tx, user.tenant, key, digest)
            if earlier is not None:
                return jobs.get_job(tx, user.tenant, earlier)
    columns = _columns(service, user, body)
    id = new_id("ftjob-")
    with service.database.begin() as tx:
        if key is not None:
            earlier = tenants.take_key(tx, user.tenant, key, digest, id)
            if earlier is not None:
                return jobs.get_job(tx, user.tenant, earlier)
        _check_quotas(tx, user, columns["planned_tokens"])
        row = jobs.create_job(tx, user.tenant, id=id, **columns)
        user.note(tx, "job.create", id, {"model": body.model, "training_file": body.training_file})
    return row


def _columns(service: ApiService, user: Caller, body: CreateJob) -> dict[str, Any]:
    """Checks everything about the job and returns its columns; nothing is written yet."""
    base = _base_of(service, user, body.model)
    most = user.owner["max_priority"]
    if body.priority is not None and body.priority > most:
        raise invalid(f"The priority is {body.priority}; yours may be at most {most}.", "priority", "invalid_value")
    _check_integrations(body)
    given = _hyperparameters(body)
    extra = _extra(body)
    if base != body.model:
        if "adapter" in extra:
            param = "lora" if body.lora is not None else "settings.adapter"
            raise invalid("A fine-tuned model keeps the shape of its adapter; leave it out.", param, "invalid_value")
        extra["init_adapter"] = body.model
    # The cheap checks come first, since a file may be large.
    _build(new_job.job_settings(resolve(given, 1), extra), body)
    train = find_training_file(service, user, body.training_file, "training_file")
    valid = body.validation_file and find_training_file(service, user, body.validation_file, "validation_file")
    reading: dict[str, Any] = {name: str(extra.get(name, "auto")) for name in ("data_format", "objective")}
    reading["data_columns"] = extra.get("data_columns") or {}
    num_samples = _check_file(service, train, "training_file", reading)
    if valid:
        _check_file(service, valid, "validation_file", reading, min_samples=1)
    resolved = resolve(given, num_samples)
    settings = new_job.job_settings(resolved, extra)
    job = _build(settings, body)
    kind = "supervised" if body.method is None else body.method.type
    used = new_job.used_hyperparameters(resolved, extra, job)
    planned = usage.guess_tokens(job, num_samples, train["bytes"])
    return {
        "model": base,
        "training_file": body.training_file,
        "validation_file": body.validation_file,
        "suffix": body.suffix,
        "seed": DEFAULT_SEED if body.seed is None else body.seed,
        "method": {"type": kind, kind: {"hyperparameters": used}},
        "settings": settings,
        "integrations": [i.model_dump(exclude_none=True) for i in body.integrations or ()],
        "metadata": body.metadata,
        "priority": body.priority or 0,
        "planned_tokens": planned,
    }


def _check_integrations(body: CreateJob) -> None:
    if body.integrations and importlib.util.find_spec("wandb") is None:
        message = "This server has no Weights & Biases; its operator can install it. Leave integrations out."
        raise invalid(message, "integrations", "unsupported_integration")


def _base_of(service: ApiService, user: Caller, model: str) -> str:
    """Returns the backbone of a job that starts from `model`: a backbone, or a fine-tuned model of the tenant. Every
    model that cannot be trained, another tenant's included, gets the same 400."""
    known = service.settings.base_models
    if model in known:
        return model
    if model.startswith("ft:"):
        with contextlib.suppress(NotFound), service.database.read() as tx:
            found = resolve_model(tx, service, user.tenant, model)
            if found.base in known:
                return found.base
    message = f"The model '{model}' cannot be fine-tuned here; use {', '.join(known)} or a model trained on it."
    raise invalid(message, "model", "model_not_found")


def _hyperparameters(body: CreateJob) -> dict[str, Any]:
    method = body.method
    if method is not None and method.type == "reinforcement":
        message = "The method 'reinforcement' is not available; use 'supervised' or 'dpo'."
        raise invalid(message, "method.type", "unsupported_method")
    own = None if method is None else method.dpo if method.type == "dpo" else method.supervised
    inner = own.hyperparameters if own is not None else None
    if inner is not None and body.hyperparameters is not None:
        raise invalid("hyperparameters are given twice; keep those in method.", "hyperparameters", "invalid_value")
    chosen = inner or body.hyperparameters
    return {} if chosen is None else chosen.model_dump()


def _extra(body: CreateJob) -> dict[str, Any]:
    """Returns our own fields of the request as settings of a jobs file."""
    given = {"adapter": body.lora, "max_steps": body.max_steps, "max_length": body.max_length}
    short = {name: value for name, value in given.items() if value is not None}
    is_dpo = body.method is not None and body.method.type == "dpo"
    return new_job.user_settings({**(body.settings or {})}, {**short, **({"objective": "dpo"} if is_dpo else {})})


def _build(settings: Mapping[str, Any], body: CreateJob) -> JobSpec:
    """Makes a JobSpec of the settings; an error names the field as the user wrote it."""
    try:
        return new_job.build_spec(settings, name="job", train_data="t", eval_data="v" if body.validation_file else None)
    except ConfigError as error:
        where = error.where or ""
        if body.lora is not None and where.startswith("adapter."):
            where = "lora." + where.removeprefix("adapter.")
        elif where.split(".")[0] in (body.settings or {}) or where.startswith("adapter."):
            where = f"settings.{where}"
        raise ConfigError(error.message, where=where or None, hint=error.hint) from None


def _check_file(
    service: ApiService, file: DbRow, param: str, reading: Mapping[str, Any], *, min_samples: int | None = None
) -> int:
    """Checks a file and returns its number of samples; a blob never changes, so each is read once."""
    key = (file["blob"], json.dumps(reading, sort_keys=True), min_samples)
    known = service.checked.get(key)
    if known is not None:
        return known
    service.blobs.check(file["blob"], file["sha256"])
    with service.blobs.open(file["blob"]) as stream:
        report = check_training_file(
            stream, file["filename"], service.settings.limits, **reading, min_samples=min_samples
        )
    refuse_problems(report, param)
    if len(service.checked) >= MAX_CHECKED:
        service.checked.clear()
    service.checked[key] = report.num_samples
    return report.num_samples


def _check_quotas(tx: Tx, user: Caller, planned_tokens: int) -> None:
    # Without the lock, several jobs at once could each be granted the same tokens.
    usage.lock_tenant(tx, user.tenant)
    limit = user.owner["max_active_jobs"]
    if limit is not None and (active := jobs.count_active(tx, user.tenant)) >= limit:
        raise OverLimit(f"{active:,} of at most {limit:,} jobs are active; wait for one to end, or cancel one.")
    usage.check_tokens(tx, user.tenant, user.owner["max_trained_tokens"], planned_tokens)


event_router = APIRouter(prefix="/v1/fine_tuning/jobs", tags=["Fine-tuning"])
POLL_S = 0.2
"""How often a stream looks for new events; this costs next to nothing while there are none."""
KEEP_ALIVE_S = 15.0
MOST = 50
"""How many events are read at a time, so that a long history does not hold up other requests."""


@event_router.get("/{job_id}/events", response_model=None)
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
        return as_json(listed(jobs.list_events(tx, user.tenant, job_id, after, limit), event_object))

    def position(tx: Tx) -> int:
        jobs.get_job(tx, user.tenant, job_id)
        # The id is looked up here so that an unknown one is a 404 and not a stream that breaks off.
        return jobs.seq_of(tx, user.tenant, job_id, start) if start else 0

    if not stream:
        return ready(await service.read_cache.read(("events", user.tenant, job_id, after, limit), page))
    seq = await service.read_cache.read(("position", user.tenant, job_id, start), position)
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(
        _follow(service, user.tenant, job_id, seq), media_type="text/event-stream", headers=headers
    )


async def _follow(service: ApiService, tenant: str, job_id: str, seq: int) -> AsyncIterator[bytes]:
    last_sent = time.monotonic()

    def look(tx: Tx) -> tuple[list[DbRow], bool]:
        # The last event is written with the final state.
        is_over = jobs.get_job(tx, tenant, job_id)["status"] in FINAL_STATES
        return jobs.events_since(tx, tenant, job_id, seq, MOST), is_over

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
            last_sent = time.monotonic()
            # Otherwise a client that takes events as fast as they come would keep all others waiting.
            await asyncio.sleep(0)
            continue
        if time.monotonic() - last_sent > KEEP_ALIVE_S:
            last_sent = time.monotonic()
            yield b": waiting\n\n"
        await asyncio.sleep(POLL_S)
