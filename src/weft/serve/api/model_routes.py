"""/v1/models, checkpoint permissions (of which there are none), /v1/usage and /v1/workers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import PlainTextResponse, StreamingResponse

from weft.serve.adapter_folders import adapter_at, is_url, row_of
from weft.serve.api.errors import ApiError, invalid
from weft.serve.api.pending_answers import check_adapter
from weft.serve.api.requests import CreatePermission, LoadAdapter, UnloadAdapter, body_of, documented
from weft.serve.api.responses import deleted, model_object, worker_object
from weft.serve.api.service import (
    OWNER,
    ApiService,
    Caller,
    ModelsUser,
    Operator,
    UsageUser,
    resolve_model,
    service_of,
)
from weft.serve.api.stored_files import download
from weft.serve.db import adapters, files, jobs, usage
from weft.serve.db.engine import DbRow, Tx, now
from weft.serve.db.files import discard, named_blobs
from weft.serve.db.leases import steer_workers
from weft.serve.db.usage import token_usage
from weft.serve.db.workers import all_workers, held_by_worker, live_workers
from weft.serve.errors import NotFound, NotPossible

model_router = APIRouter(prefix="/v1", tags=["Models"])


@model_router.get("/models")
def list_models(request: Request, user: ModelsUser) -> dict[str, Any]:
    """Backbones, adapters of `--adapters` that can be used, and the tenant's fine-tuned models."""
    service = service_of(request)
    with service.database.read() as tx:
        mine = files.list_models(tx, user.tenant)
        shared = [] if service.settings.adapters is None else adapters.list_adapters(tx, service.settings.adapters)
    data = [model_object(name, 0, OWNER) for name in service.settings.base_models]
    # Those that an admin loaded come first in the list and replace others of their names.
    named = {row["name"]: row for row in reversed(shared) if row["error"] is None}
    data += [
        _shape(name, row["created_at"], OWNER, row["base"], None, row["bytes"])
        for name, row in sorted(named.items())
        if name not in service.settings.base_models
    ]
    data += [_shape(row["id"], row["created_at"], user.tenant, row["base"], row["job"], row["bytes"]) for row in mine]
    return {"object": "list", "data": data}


@model_router.get("/models/{model:path}/adapter", response_class=StreamingResponse)
def download_adapter(request: Request, user: ModelsUser, model: str) -> StreamingResponse:
    """The adapter as a zip archive of PEFT's files."""
    service = service_of(request)
    with service.database.read() as tx:
        found = resolve_model(tx, service, user.tenant, model)
    if found.blob is None:
        raise NotPossible(f"'{model}' is a backbone and has no adapter; name a model trained on it.", where="model")
    if adapters.folder_of(found.blob) is not None:
        raise NotPossible(f"'{model}' lies in a directory of the server's operator.", where="model")
    return download(service, found.blob, f"{model.replace(':', '-')}.zip", "application/zip")


@model_router.get("/models/{model:path}")
def retrieve_model(request: Request, user: ModelsUser, model: str) -> dict[str, Any]:
    """One model."""
    service = service_of(request)
    with service.database.read() as tx:
        found = resolve_model(tx, service, user.tenant, model)
    return _shape(model, found.created, found.owner, found.base, found.job, found.bytes)


@model_router.delete("/models/{model:path}")
def delete_model(request: Request, user: ModelsUser, model: str) -> dict[str, Any]:
    """Forgets a fine-tuned model with the checkpoints of its job, or one checkpoint; their weights go."""
    service = service_of(request)
    if model in service.settings.base_models:
        raise NotPossible(f"'{model}' is a backbone and stays; only what was trained can be deleted.", where="model")
    with service.database.begin() as tx:
        root = service.settings.adapters
        if root is not None and adapters.find_adapter(tx, root, model) is not None:
            raise NotPossible(f"'{model}' lies in a directory of the server's operator, and stays.", where="model")
        gone = _forget(tx, user.tenant, model)
        user.note(tx, "model.delete", model)
        unused = {row["blob"] for row in gone if row["blob"]} - named_blobs(tx)
    # If the process dies here, the daily clean-up deletes the blobs.
    discard(service.blobs, unused)
    if service.sampler is not None:
        for blob in unused:
            service.sampler.forget(blob)
    return deleted(model, "model")


def _forget(tx: Tx, tenant: str, name: str) -> list[DbRow]:
    """Deletes a model or checkpoint and returns all deleted rows, unless a job is still to start from one of them."""
    try:
        if ":ckpt-step-" in name:
            gone = files.delete_checkpoints(tx, tenant, model=name)
        else:
            model = files.delete_model(tx, tenant, name)
            gone = [model, *files.delete_checkpoints(tx, tenant, job=model["job"])]
    except NotFound:
        raise files.missing_model(name) from None
    for lost in (row["model"] if "model" in row else row["id"] for row in gone):
        needed = jobs.starting_from(tx, tenant, lost)
        if needed is not None:
            raise NotPossible(f"Job {needed} starts from {lost}; wait for its end or cancel it.", where="model")
    return gone


@model_router.post("/load_lora_adapter", openapi_extra=documented(LoadAdapter), response_class=PlainTextResponse)
def load_adapter(request: Request, user: Operator, body: Annotated[LoadAdapter, Depends(body_of(LoadAdapter))]) -> str:
    """Serves the adapter in a directory that the server sees, or at a URL; as in vLLM, for operators."""
    service = service_of(request)
    root, name = _adapters_root(service), body.lora_name
    own = adapter_at(name, _located(root, body.lora_path))
    if own is None:
        raise ApiError(404, "There is no adapter in 'lora_path'.", param="lora_path", code="adapter_not_found")
    row = row_of(own, service.settings.base_models)
    row["error"] = row["error"] or _check(service, row)
    if row["error"] is not None:
        raise invalid(f"The adapter cannot be used: {row['error']}", "lora_path", "broken_adapter")
    with service.database.begin() as tx:
        taken = name in service.settings.base_models or adapters.find_adapter(tx, root, name) is not None
        if taken and not body.load_inplace:
            message = f"There is a model '{name}' already; use another name, or replace an adapter by 'load_inplace'."
            raise invalid(message, "lora_name", "model_exists")
        if name in service.settings.base_models:
            raise invalid(f"'{name}' is a backbone; use another name.", "lora_name", "model_exists")
        adapters.put_adapter(tx, adapters.BY_API, name, **row)
        user.note(tx, "adapter.load", name, {"path": own.path})
    return f"Success: LoRA adapter '{name}' added successfully."


@model_router.post("/unload_lora_adapter", openapi_extra=documented(UnloadAdapter), response_class=PlainTextResponse)
def unload_adapter(
    request: Request, user: Operator, body: Annotated[UnloadAdapter, Depends(body_of(UnloadAdapter))]
) -> str:
    """Serves an adapter that was loaded by name no longer; its files stay."""
    service = service_of(request)
    root = _adapters_root(service)
    with service.database.begin() as tx:
        if not adapters.remove_adapter(tx, adapters.BY_API, body.lora_name):
            if adapters.find_adapter(tx, root, body.lora_name) is None:
                raise files.missing_model(body.lora_name)
            message = f"'{body.lora_name}' is a directory below --adapters and is served as long as it is there."
            raise invalid(message, "lora_name", "invalid_state")
        user.note(tx, "adapter.unload", body.lora_name)
    return f"Success: LoRA adapter '{body.lora_name}' removed successfully."


def _adapters_root(service: ApiService) -> str:
    if service.settings.adapters is None:
        raise NotPossible("This server has no directory of adapters; its operator can give one with --adapters.")
    return service.settings.adapters


def _located(root: str, path: str) -> str:
    """The directory or URL at a path from the root."""
    if is_url(path) or (is_url(root) and not Path(path).is_absolute()):
        return path if is_url(path) else f"{root}/{path}"
    return str(Path(root, path).resolve())


def _check(service: ApiService, row: DbRow) -> str | None:
    """What a worker finds wrong with an adapter. Without a worker at the moment, the scan has it checked later."""
    with service.database.read() as tx:
        workers = live_workers(tx, row["base"])
    if not workers:
        return None
    error = check_adapter(workers[0], adapters.source_of(row))
    row["is_checked"] = True
    return error


@model_router.get("/fine_tuning/checkpoints/{checkpoint}/permissions")
def list_permissions(
    request: Request,
    user: ModelsUser,
    checkpoint: str,
    after: Annotated[str | None, Query(max_length=64)] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 10,
) -> dict[str, Any]:
    """Projects that may use a checkpoint: none, a tenant's models are its own."""
    with service_of(request).database.read() as tx:
        files.get_checkpoint(tx, user.tenant, checkpoint)
    return {"object": "list", "data": [], "has_more": False, "first_id": None, "last_id": None}


@model_router.post("/fine_tuning/checkpoints/{checkpoint}/permissions", openapi_extra=documented(CreatePermission))
def create_permission(
    request: Request,
    user: ModelsUser,
    checkpoint: str,
    body: Annotated[CreatePermission, Depends(body_of(CreatePermission))],
) -> dict[str, Any]:
    """Refused: there are no projects to share with."""
    with service_of(request).database.read() as tx:
        files.get_checkpoint(tx, user.tenant, checkpoint)
    raise ApiError(403, "Checkpoints cannot be shared with other projects here.", code="not_supported")


@model_router.delete("/fine_tuning/checkpoints/{checkpoint}/permissions/{permission_id}")
def delete_permission(request: Request, user: ModelsUser, checkpoint: str, permission_id: str) -> dict[str, Any]:
    """There is none to delete."""
    with service_of(request).database.read() as tx:
        files.get_checkpoint(tx, user.tenant, checkpoint)
    raise NotFound(f"No such permission: {permission_id}", where="permission_id")


def _shape(
    id: str, created: int, owner: str, base: str, job: str | None = None, bytes: int | None = None
) -> dict[str, Any]:
    origin = {"root": base if base != id else None, "job": job, "bytes": bytes}
    return model_object(id, created, owner, **{name: value for name, value in origin.items() if value is not None})


usage_router = APIRouter(prefix="/v1", tags=["Usage"])
UnixTime = Annotated[int | None, Query(ge=0, lt=2**53)]


@usage_router.get("/usage")
def read_usage(
    request: Request, user: UsageUser, start_time: UnixTime = None, end_time: UnixTime = None
) -> dict[str, Any]:
    """Tokens trained, evaluated, prompted and answered by what began within [start_time, end_time); limits now."""
    with service_of(request).database.read() as tx:
        used = usage.usage_of(tx, user.tenant, start=start_time, end=end_time)
        tokens = token_usage(tx, user.tenant)
        limits = {
            "active_jobs": (jobs.count_active(tx, user.tenant), user.owner["max_active_jobs"]),
            "trained_tokens": (tokens.trained, user.owner["max_trained_tokens"]),
            "stored_bytes": (files.stored_bytes(tx, user.tenant), user.owner["max_stored_bytes"]),
        }
    shown: dict[str, Any] = {name: {"used": now, "limit": most} for name, (now, most) in limits.items()}
    # What unfinished jobs are yet to train counts against the limit as well.
    shown["trained_tokens"]["reserved"] = tokens.reserved
    return {
        "object": "usage",
        "organization_id": user.tenant,
        "trained_tokens": used["totals"]["trained"],
        "evaluated_tokens": used["totals"]["evaluated"],
        "prompt_tokens": used["totals"]["prompt"],
        "completion_tokens": used["totals"]["completion"],
        "by_model": used["by_model"],
        "limits": shown,
    }


worker_router = APIRouter(prefix="/v1/workers", tags=["Operations"])


@worker_router.get("")
def list_workers(request: Request, user: Operator) -> dict[str, Any]:
    """All workers with their machines, also those that are lost; needs a key with the scope `admin`."""
    with service_of(request).database.read() as tx:
        held, at = held_by_worker(tx), now(tx)
        return {"object": "list", "data": [worker_object(row, held, at) for row in all_workers(tx)]}


@worker_router.post("/{worker}/drain")
def drain(request: Request, worker: str, user: Operator) -> dict[str, Any]:
    """Has a worker, or all workers of a machine, save their jobs, give them to others and claim no more."""
    return _steer(service_of(request), user, worker, "drain")


@worker_router.post("/{worker}/undrain")
def undrain(request: Request, worker: str, user: Operator) -> dict[str, Any]:
    """Lets drained workers claim jobs again."""
    return _steer(service_of(request), user, worker, "undrain")


@worker_router.post("/{worker}/remove")
def remove(request: Request, worker: str, user: Operator) -> dict[str, Any]:
    """Has workers give their jobs to others and end for good; those that are lost are forgotten."""
    return _steer(service_of(request), user, worker, "remove")


def _steer(service: ApiService, user: Caller, target: str, wish: str) -> dict[str, Any]:
    with service.database.begin() as tx:
        steered = steer_workers(tx, target, wish)
        user.note(tx, f"worker.{wish}", target, data={"workers": [row["id"] for row in steered]})
        held, at = held_by_worker(tx), now(tx)
        ids = {row["id"] for row in steered}
        left = [worker_object(row, held, at) for row in all_workers(tx) if row["id"] in ids]
    return {"object": "list", "data": left}
