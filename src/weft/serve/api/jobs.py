"""/v1/fine_tuning/jobs: make, look at, and steer jobs."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from weft.errors import ConfigError
from weft.serve.api.auth import Caller, needs
from weft.serve.api.body import body_of, documented
from weft.serve.api.errors import invalid
from weft.serve.api.files import find_training_file, refuse_problems
from weft.serve.api.models import find
from weft.serve.api.requests import CreateJob
from weft.serve.api.service import Service, service_of
from weft.serve.api.shapes import as_json, checkpoint_object, job_object, listed, ready, without_none
from weft.serve.db.engine import Tx
from weft.serve.errors import NotFound, OverLimit
from weft.serve.jobs import quota, spec
from weft.serve.jobs.training_file import check_training_file
from weft.serve.records import checkpoints, idempotency, jobs
from weft.serve.records.rows import Record, new_id
from weft.spec import JobSpec

router = APIRouter(prefix="/v1/fine_tuning/jobs", tags=["Fine-tuning"])
User = Annotated[Caller, Depends(needs("jobs"))]
After = Annotated[str | None, Query(max_length=64)]
Limit = Annotated[int, Query(ge=1, le=100)]
DEFAULT_SEED = 42
DEFAULT_LIMIT = 20
MAX_CHECKED = 10_000
"""Files of which is remembered that they can be trained on."""
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


@router.get("", response_model=dict[str, Any])
async def list_jobs(request: Request, user: User, after: After = None, limit: Limit = DEFAULT_LIMIT) -> Response:
    """Jobs, newest first; `metadata[key]=value` selects, `metadata=null` selects those without."""
    wanted = {m[1]: value for name, value in request.query_params.items() if (m := _METADATA.fullmatch(name))}
    if any('"' in key or "\\" in key for key in wanted) or len(wanted) > 16:
        raise invalid("At most 16 keys, without quotes and backslashes.", "metadata", "invalid_value")
    none = request.query_params.get("metadata") == "null"

    def look(tx: Tx) -> bytes:
        page = jobs.list_jobs(tx, user.tenant, after, limit, metadata=wanted, no_metadata=none)
        return as_json(listed(page, job_object))

    # What has the right metadata may be anywhere in a long list.
    key = ("jobs", user.tenant, after, limit) if not wanted and not none else None
    is_polled = after is None and limit == DEFAULT_LIMIT
    basis = jobs.newest_basis(user.tenant, limit) if is_polled else None
    return ready(await service_of(request).fresh.read(key, look, basis))


@router.get("/{job_id}", response_model=dict[str, Any])
async def retrieve(request: Request, user: User, job_id: str) -> Response:
    """One job."""

    def look(tx: Tx) -> bytes:
        return as_json(job_object(jobs.get_job(tx, user.tenant, job_id)))

    basis = jobs.job_basis(user.tenant, job_id)
    return ready(await service_of(request).fresh.read(("job", user.tenant, job_id), look, basis))


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
        _check_quotas(tx, user, columns["planned_tokens"])
        row = jobs.create_job(tx, user.tenant, id=id, **columns)
        user.note(tx, "job.create", id, {"model": body.model, "training_file": body.training_file})
    return row


def _columns(service: Service, user: Caller, body: CreateJob) -> dict[str, Any]:
    """Everything about the job, checked; nothing is written yet."""
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
    planned = quota.guess_tokens(_build(settings, body), num_samples, train["bytes"])
    return {
        "model": base,
        "training_file": body.training_file,
        "validation_file": body.validation_file,
        "suffix": body.suffix,
        "seed": DEFAULT_SEED if body.seed is None else body.seed,
        "method": {"type": "supervised", "supervised": {"hyperparameters": resolved}},
        "settings": settings,
        "integrations": [i.model_dump(exclude_none=True) for i in body.integrations or ()],
        "metadata": body.metadata,
        "priority": body.priority or 0,
        "planned_tokens": planned,
    }


def _check_integrations(body: CreateJob) -> None:
    if body.integrations and importlib.util.find_spec("wandb") is None:
        message = "This server has no Weights & Biases; ask its operator for it, or leave integrations out."
        raise invalid(message, "integrations", "unsupported_integration")


def _base_of(service: Service, user: Caller, model: str) -> str:
    """The backbone of a job that starts from `model`: itself, or what a fine-tuned model of the tenant was trained on.

    Whatever cannot be trained, another tenant's model among it, is the same 400.
    """
    known = service.settings.base_models
    if model in known:
        return model
    if model.startswith("ft:"):
        with contextlib.suppress(NotFound), service.database.read() as tx:
            found = find(tx, service, user.tenant, model)
            if found.base in known:
                return found.base
    message = f"The model '{model}' cannot be fine-tuned here; use {', '.join(known)} or a model trained on it."
    raise invalid(message, "model", "model_not_found")


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


def _build(settings: Mapping[str, Any], body: CreateJob) -> JobSpec:
    """The JobSpec the settings make; if they make none, the error names the field as the user wrote it."""
    try:
        return spec.build_spec(settings, name="job", train_data="t", eval_data="v" if body.validation_file else None)
    except ConfigError as error:
        where = error.where or ""
        if body.lora is not None and where.startswith("adapter."):
            where = "lora." + where.removeprefix("adapter.")
        elif where.split(".")[0] in (body.settings or {}) or where.startswith("adapter."):
            where = f"settings.{where}"
        raise ConfigError(error.message, where=where or None, hint=error.hint) from None


def _check_file(service: Service, file: Record, param: str, data_format: str, *, min_samples: int | None = None) -> int:
    """The number of samples in a file that can be trained on; a blob never changes, so it is read once."""
    asked = (file["blob"], data_format, min_samples)
    known = service.checked.get(asked)
    if known is not None:
        return known
    with service.blobs.open(file["blob"]) as stream:
        report = check_training_file(
            stream, file["filename"], service.settings.limits, data_format=data_format, min_samples=min_samples
        )
    refuse_problems(report, param)
    if len(service.checked) >= MAX_CHECKED:
        service.checked.clear()
    service.checked[asked] = report.num_samples
    return report.num_samples


def _check_quotas(tx: Tx, user: Caller, planned_tokens: int) -> None:
    # Many jobs at once are each promised the same room.
    quota.lock_tenant(tx, user.tenant)
    limit = user.owner["max_active_jobs"]
    if limit is not None and (active := jobs.count_active(tx, user.tenant)) >= limit:
        raise OverLimit(f"{active:,} of at most {limit:,} jobs are active; wait for one to end, or cancel one.")
    quota.check_tokens(tx, user.tenant, user.owner["max_trained_tokens"], planned_tokens)
