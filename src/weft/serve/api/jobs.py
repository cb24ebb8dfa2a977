"""/v1/fine_tuning/jobs: make, look at, and steer jobs."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request
from starlette.concurrency import run_in_threadpool

from weft.errors import ConfigError
from weft.serve.api.auth import Caller, needs
from weft.serve.api.body import body_of, documented
from weft.serve.api.errors import invalid
from weft.serve.api.files import find_training_file, refuse_problems
from weft.serve.api.requests import CreateJob
from weft.serve.api.service import Service, service_of
from weft.serve.api.shapes import checkpoint_object, job_object, listed, without_none
from weft.serve.db.engine import Tx
from weft.serve.errors import OverLimit
from weft.serve.jobs import spec
from weft.serve.jobs.training_file import check_training_file
from weft.serve.records import checkpoints, idempotency, jobs, usage
from weft.serve.records.rows import Record, new_id

router = APIRouter(prefix="/v1/fine_tuning/jobs", tags=["Fine-tuning"])
User = Annotated[Caller, Depends(needs("jobs"))]
After = Annotated[str | None, Query(max_length=64)]
Limit = Annotated[int, Query(ge=1, le=100)]
DEFAULT_SEED = 42
_METADATA = re.compile(r"metadata\[(.+)\]", re.DOTALL)


@router.post("", openapi_extra=documented(CreateJob))
async def create(
    request: Request,
    user: User,
    body: Annotated[CreateJob, Depends(body_of(CreateJob))],
    idempotency_key: Annotated[str | None, Header(max_length=255)] = None,
) -> dict[str, Any]:
    """Starts a job. With an `Idempotency-Key` header the same request can be sent again and makes one job."""
    row = await run_in_threadpool(_create, service_of(request), user, body, idempotency_key)
    request.state.log["job"] = row["id"]
    return job_object(row)


@router.get("")
def list_jobs(request: Request, user: User, after: After = None, limit: Limit = 20) -> dict[str, Any]:
    """Jobs, newest first; `metadata[key]=value` selects, `metadata=null` selects those without."""
    wanted = {m[1]: value for name, value in request.query_params.items() if (m := _METADATA.fullmatch(name))}
    if any('"' in key or "\\" in key for key in wanted) or len(wanted) > 16:
        raise invalid("At most 16 keys, without quotes and backslashes.", "metadata", "invalid_value")
    none = request.query_params.get("metadata") == "null"
    with service_of(request).database.read() as tx:
        page = jobs.list_jobs(tx, user.tenant, after, limit, metadata=wanted, no_metadata=none)
    return listed(page, job_object)


@router.get("/{job_id}")
def retrieve(request: Request, user: User, job_id: str) -> dict[str, Any]:
    """One job."""
    with service_of(request).database.read() as tx:
        return job_object(jobs.get_job(tx, user.tenant, job_id))


@router.post("/{job_id}/cancel")
def cancel(request: Request, user: User, job_id: str) -> dict[str, Any]:
    """Stops a job for good, at its next step if it is training."""
    return _ask(request, user, job_id, "cancel")


@router.post("/{job_id}/pause")
def pause(request: Request, user: User, job_id: str) -> dict[str, Any]:
    """Stops a job so that it can go on later, at its next step if it is training."""
    return _ask(request, user, job_id, "pause")


@router.post("/{job_id}/resume")
def resume(request: Request, user: User, job_id: str) -> dict[str, Any]:
    """Lets a paused job go on where it was."""
    return _ask(request, user, job_id, "resume")


@router.get("/{job_id}/checkpoints")
def list_checkpoints(
    request: Request, user: User, job_id: str, after: After = None, limit: Limit = 10
) -> dict[str, Any]:
    """Checkpoints of a job, newest first."""
    with service_of(request).database.read() as tx:
        jobs.get_job(tx, user.tenant, job_id)
        page = checkpoints.list_checkpoints(tx, user.tenant, job_id, after, limit)
    return listed(page, checkpoint_object, ends=True)


def _ask(request: Request, user: Caller, job_id: str, wish: str) -> dict[str, Any]:
    request.state.log["job"] = job_id
    with service_of(request).database.begin() as tx:
        row = jobs.ask(tx, user.tenant, job_id, wish)
        user.note(tx, f"job.{wish}", job_id)
    return job_object(row)


def _create(service: Service, user: Caller, body: CreateJob, key: str | None) -> Record:
    """The job of a request: made now, or made before by the same request."""
    digest = hashlib.sha256(json.dumps(body.model_dump(), sort_keys=True).encode()).hexdigest()
    if key is not None:
        with service.database.read() as tx:
            earlier = idempotency.find_key_use(tx, user.tenant, key, digest)
            if earlier is not None:
                return jobs.get_job(tx, user.tenant, earlier)
    columns = _columns(service, user, body)
    id = new_id("ftjob-")
    with service.database.begin() as tx:
        if key is not None:
            earlier = idempotency.take_key(tx, user.tenant, key, digest, id)
            if earlier is not None:
                return jobs.get_job(tx, user.tenant, earlier)
        _check_quotas(tx, user)
        row = jobs.create_job(tx, user.tenant, id=id, **columns)
        user.note(tx, "job.create", id, {"model": body.model, "training_file": body.training_file})
    return row


def _columns(service: Service, user: Caller, body: CreateJob) -> dict[str, Any]:
    """Everything about the job, checked; nothing is written yet."""
    if body.model not in service.settings.base_models:
        known = ", ".join(service.settings.base_models)
        raise invalid(f"The model '{body.model}' cannot be fine-tuned here; use {known}.", "model", "model_not_found")
    most = user.owner["max_priority"]
    if body.priority is not None and body.priority > most:
        raise invalid(f"The priority is {body.priority}; yours may be at most {most}.", "priority", "invalid_value")
    given = _hyperparameters(body)
    extra = _extra(body)
    # Cheap checks first: a file may be large.
    _build(spec.job_settings(spec.resolve(given, 1), extra), body)
    train = find_training_file(service, user, body.training_file, "training_file")
    valid = body.validation_file and find_training_file(service, user, body.validation_file, "validation_file")
    data_format = str(extra.get("data_format", "auto"))
    num_samples = _check_file(service, train, "training_file", data_format)
    if valid:
        _check_file(service, valid, "validation_file", data_format, min_samples=1)
    resolved = spec.resolve(given, num_samples)
    settings = spec.job_settings(resolved, extra)
    _build(settings, body)
    return {
        "model": body.model,
        "training_file": body.training_file,
        "validation_file": body.validation_file,
        "suffix": body.suffix,
        "seed": DEFAULT_SEED if body.seed is None else body.seed,
        "method": {"type": "supervised", "supervised": {"hyperparameters": resolved}},
        "settings": settings,
        "integrations": [i.model_dump(exclude_none=True) for i in body.integrations or ()],
        "metadata": body.metadata,
        "priority": body.priority or 0,
    }


def _hyperparameters(body: CreateJob) -> dict[str, Any]:
    method = body.method
    if method is not None and method.type != "supervised":
        raise invalid(
            f"The method '{method.type}' is not available yet; use 'supervised'.", "method.type", "unsupported_method"
        )
    inner = method.supervised.hyperparameters if method and method.supervised else None
    if inner is not None and body.hyperparameters is not None:
        raise invalid("hyperparameters are given twice; keep those in method.", "hyperparameters", "invalid_value")
    chosen = inner or body.hyperparameters
    return {} if chosen is None else chosen.model_dump()


def _extra(body: CreateJob) -> dict[str, Any]:
    """Our own fields, as settings of a jobs file."""
    short = without_none({"adapter": body.lora, "max_steps": body.max_steps, "max_length": body.max_length})
    return spec.user_settings({**(body.settings or {})}, short)


def _build(settings: Mapping[str, Any], body: CreateJob) -> None:
    """The settings make a real JobSpec; if not, the error names the field as the user wrote it."""
    try:
        spec.build_spec(settings, name="job", train_data="t", eval_data="v" if body.validation_file else None)
    except ConfigError as error:
        where = error.where or ""
        if body.lora is not None and where.startswith("adapter."):
            where = "lora." + where.removeprefix("adapter.")
        elif where.split(".")[0] in (body.settings or {}) or where.startswith("adapter."):
            where = f"settings.{where}"
        raise ConfigError(error.message, where=where or None, hint=error.hint) from None


def _check_file(service: Service, file: Record, param: str, data_format: str, *, min_samples: int | None = None) -> int:
    with service.blobs.open(file["blob"]) as stream:
        report = check_training_file(
            stream, file["filename"], service.settings.limits, data_format=data_format, min_samples=min_samples
        )
    refuse_problems(report, param)
    return report.num_samples


def _check_quotas(tx: Tx, user: Caller) -> None:
    limit = user.owner["max_active_jobs"]
    if limit is not None and (active := jobs.count_active(tx, user.tenant)) >= limit:
        raise OverLimit(f"{active:,} of at most {limit:,} jobs are active; wait for one to end, or cancel one.")
    limit = user.owner["max_trained_tokens"]
    if limit is not None and (used := usage.trained_tokens(tx, user.tenant)) >= limit:
        raise OverLimit(f"{used:,} tokens have been trained of at most {limit:,}; ask the operator for more.")
