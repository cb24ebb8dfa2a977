"""/v1/files: tenants upload training files and download result files."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from weft.serve.api.auth import FilesUser
from weft.serve.api.bodies.multipart import UploadForm, receive_file
from weft.serve.api.errors import invalid
from weft.serve.api.responses import deleted, file_object, listed
from weft.serve.api.service import service_of
from weft.serve.api.stored_files import PURPOSE, allowance_of, check_purpose, download, keep_file
from weft.serve.blob_gc import discard
from weft.serve.records import files
from weft.settings.fields import describe

router = APIRouter(prefix="/v1/files", tags=["Files"])
EXPIRY_S = (3600, 2_592_000)
MAX_PAGE = 10_000
_FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": [PURPOSE]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": EXPIRY_S[0], "maximum": EXPIRY_S[1]},
    },
}


@router.post(
    "",
    openapi_extra={"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}},
)
async def upload(request: Request, user: FilesUser) -> dict[str, Any]:
    """Takes in a training file: JSON lines, checked before it is kept."""
    service = service_of(request)
    allowance = await run_in_threadpool(allowance_of, service, user)
    with await run_in_threadpool(service.blobs.create) as writer:
        form = await receive_file(request, writer, most=allowance.most, too_large=allowance.refusal)
        expires_in_s = _check_form(form)
        if writer.num_bytes == 0:
            raise invalid(f"{form.filename}: is empty.", "file", "empty_file")
        purpose = form.fields["purpose"]
        row = await run_in_threadpool(keep_file, service, user, writer, form.filename, purpose, expires_in_s)
    return file_object(row)


@router.get("")
def list_files(
    request: Request,
    user: FilesUser,
    after: Annotated[str | None, Query(max_length=64)] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = MAX_PAGE,
    order: Literal["asc", "desc"] = "desc",
    purpose: Annotated[str | None, Query(max_length=64)] = None,
) -> dict[str, Any]:
    """Files, newest first."""
    with service_of(request).database.read() as tx:
        page = files.list_files(tx, user.tenant, after, limit, purpose=purpose, newest_first=order == "desc")
    return listed(page, file_object, ends=True)


@router.get("/{file_id}")
def retrieve_file(request: Request, user: FilesUser, file_id: str) -> dict[str, Any]:
    """One file's row."""
    with service_of(request).database.read() as tx:
        return file_object(files.get_file(tx, user.tenant, file_id))


@router.get("/{file_id}/content", response_class=StreamingResponse)
def file_content(request: Request, user: FilesUser, file_id: str) -> StreamingResponse:
    """The bytes of a file."""
    service = service_of(request)
    with service.database.read() as tx:
        row = files.get_file(tx, user.tenant, file_id)
    return download(service, row["blob"], row["filename"])


@router.delete("/{file_id}")
def delete_file(request: Request, user: FilesUser, file_id: str) -> dict[str, Any]:
    """Forgets a file; jobs that have begun with it go on."""
    service = service_of(request)
    with service.database.begin() as tx:
        row = files.delete_file(tx, user.tenant, file_id)
        user.note(tx, "file.delete", file_id)
        in_use = files.is_needed(tx, user.tenant, file_id)
    if not in_use:
        discard(service.blobs, [row["blob"]])
    return deleted(file_id, "file")


def _check_form(form: UploadForm) -> int | None:
    """Checks the form's fields; returns for how many seconds the file is kept, or None if for good."""
    purpose = form.fields.get("purpose")
    if purpose is None:
        raise invalid("Missing required parameter: 'purpose'.", "purpose", "missing_required_parameter")
    check_purpose(purpose)
    seconds, anchor = form.fields.get("expires_after[seconds]"), form.fields.get("expires_after[anchor]")
    if seconds is None and anchor is None:
        return None
    if anchor not in (None, "created_at"):
        param = "expires_after.anchor"
        raise invalid(f"Invalid value for '{param}': got {anchor!r}; use 'created_at'.", param, "invalid_value")
    low, high = EXPIRY_S
    if seconds is None or not re.fullmatch(r"[0-9]{1,9}", seconds) or not low <= int(seconds) <= high:
        wanted = f"got {describe(seconds)}; use a whole number from {low:,} to {high:,}."
        param = "expires_after.seconds"
        raise invalid(f"Invalid value for '{param}': {wanted}", param, "invalid_value")
    return int(seconds)
