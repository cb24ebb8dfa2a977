"""/v1/models: backbones and the models trained on them; and permissions of checkpoints, of which there are none."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import StreamingResponse

from weft.serve.api.auth import ModelsUser
from weft.serve.api.bodies.json_body import body_of, documented
from weft.serve.api.bodies.requests import CreatePermission
from weft.serve.api.errors import ApiError
from weft.serve.api.model_lookup import OWNER, missing_model, resolve_model
from weft.serve.api.responses import deleted, model_object
from weft.serve.api.service import service_of
from weft.serve.api.stored_files import download
from weft.serve.blob_gc import discard, named_blobs
from weft.serve.db.engine import Tx
from weft.serve.errors import NotFound, NotPossible
from weft.serve.records import jobs, models
from weft.serve.records.rows import DbRow

router = APIRouter(prefix="/v1", tags=["Models"])


@router.get("/models")
def list_models(request: Request, user: ModelsUser) -> dict[str, Any]:
    """Backbones and fine-tuned models."""
    service = service_of(request)
    with service.database.read() as tx:
        mine = models.list_models(tx, user.tenant)
    data = [model_object(name, 0, OWNER) for name in service.settings.base_models]
    data += [_shape(row["id"], row["created_at"], user.tenant, row["base"]) for row in mine]
    return {"object": "list", "data": data}


@router.get("/models/{model:path}/adapter", response_class=StreamingResponse)
def download_adapter(request: Request, user: ModelsUser, model: str) -> StreamingResponse:
    """The adapter as a zip archive of PEFT's files."""
    service = service_of(request)
    with service.database.read() as tx:
        found = resolve_model(tx, service, user.tenant, model)
    if found.blob is None:
        raise NotPossible(f"'{model}' is a backbone and has no adapter; name a model trained on it.", where="model")
    return download(service, found.blob, f"{model.replace(':', '-')}.zip", "application/zip")


@router.get("/models/{model:path}")
def retrieve_model(request: Request, user: ModelsUser, model: str) -> dict[str, Any]:
    """One model."""
    service = service_of(request)
    with service.database.read() as tx:
        found = resolve_model(tx, service, user.tenant, model)
    return _shape(model, found.created, found.owner, found.base)


@router.delete("/models/{model:path}")
def delete_model(request: Request, user: ModelsUser, model: str) -> dict[str, Any]:
    """Forgets a fine-tuned model with the checkpoints of its job, or one checkpoint; their weights go."""
    service = service_of(request)
    if model in service.settings.base_models:
        raise NotPossible(f"'{model}' is a backbone and stays; only what was trained can be deleted.", where="model")
    with service.database.begin() as tx:
        gone = _forget(tx, user.tenant, model)
        user.note(tx, "model.delete", model)
        unused = {row["blob"] for row in gone if row["blob"]} - named_blobs(tx)
    # If the process dies here, the daily clean-up deletes the blobs.
    discard(service.blobs, unused)
    return deleted(model, "model")


def _forget(tx: Tx, tenant: str, name: str) -> list[DbRow]:
    """Deletes a model or checkpoint and returns all deleted rows, unless a job is still to start from one of them."""
    try:
        if ":ckpt-step-" in name:
            gone = models.delete_checkpoints(tx, tenant, model=name)
        else:
            model = models.delete_model(tx, tenant, name)
            gone = [model, *models.delete_checkpoints(tx, tenant, job=model["job"])]
    except NotFound:
        raise missing_model(name) from None
    for lost in (row["model"] if "model" in row else row["id"] for row in gone):
        needed = jobs.starting_from(tx, tenant, lost)
        if needed is not None:
            raise NotPossible(f"Job {needed} starts from {lost}; wait for its end or cancel it.", where="model")
    return gone


@router.get("/fine_tuning/checkpoints/{checkpoint}/permissions")
def list_permissions(
    request: Request,
    user: ModelsUser,
    checkpoint: str,
    after: Annotated[str | None, Query(max_length=64)] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 10,
) -> dict[str, Any]:
    """Projects that may use a checkpoint: none, a tenant's models are its own."""
    with service_of(request).database.read() as tx:
        models.get_checkpoint(tx, user.tenant, checkpoint)
    return {"object": "list", "data": [], "has_more": False, "first_id": None, "last_id": None}


@router.post("/fine_tuning/checkpoints/{checkpoint}/permissions", openapi_extra=documented(CreatePermission))
def create_permission(
    request: Request,
    user: ModelsUser,
    checkpoint: str,
    body: Annotated[CreatePermission, Depends(body_of(CreatePermission))],
) -> dict[str, Any]:
    """Refused: there are no projects to share with."""
    with service_of(request).database.read() as tx:
        models.get_checkpoint(tx, user.tenant, checkpoint)
    raise ApiError(403, "Checkpoints cannot be shared with other projects here.", code="not_supported")


@router.delete("/fine_tuning/checkpoints/{checkpoint}/permissions/{permission_id}")
def delete_permission(request: Request, user: ModelsUser, checkpoint: str, permission_id: str) -> dict[str, Any]:
    """There is none to delete."""
    with service_of(request).database.read() as tx:
        models.get_checkpoint(tx, user.tenant, checkpoint)
    raise NotFound(f"No such permission: {permission_id}", where="permission_id")


def _shape(id: str, created: int, owner: str, base: str) -> dict[str, Any]:
    return model_object(id, created, owner, **({"root": base} if base != id else {}))
