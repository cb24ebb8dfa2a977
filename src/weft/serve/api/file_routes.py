"""/v1/files and /v1/uploads: tenants upload training files, whole or in parts, and download result files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from weft.serve.api.errors import ApiError, invalid
from weft.serve.api.requests import MAX_UPLOAD_PARTS, CompleteUpload, CreateUpload, body_of, documented
from weft.serve.api.responses import deleted, file_object, listed, part_object, upload_object
from weft.serve.api.service import ApiService, Caller, FilesUser, service_of
from weft.serve.api.stored_files import (
    PURPOSE,
    UploadForm,
    allowance_of,
    check_purpose,
    clean_name,
    committed,
    download,
    keep_file,
    over_quota,
    receive_file,
)
from weft.serve.blobs import CHUNK_BYTES, BlobWriter
from weft.serve.db import files
from weft.serve.db.engine import DbRow, Tx
from weft.serve.db.files import discard
from weft.serve.db.usage import lock_tenant
from weft.serve.errors import Damaged, NotFound, NotPossible
from weft.serve.settings import MIB
from weft.settings import describe

file_router = APIRouter(prefix="/v1/files", tags=["Files"])
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


@file_router.post(
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


@file_router.get("")
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


@file_router.get("/{file_id}")
def retrieve_file(request: Request, user: FilesUser, file_id: str) -> dict[str, Any]:
    """One file's row."""
    with service_of(request).database.read() as tx:
        return file_object(files.get_file(tx, user.tenant, file_id))


@file_router.get("/{file_id}/content", response_class=StreamingResponse)
def file_content(request: Request, user: FilesUser, file_id: str) -> StreamingResponse:
    """The bytes of a file."""
    service = service_of(request)
    with service.database.read() as tx:
        row = files.get_file(tx, user.tenant, file_id)
    return download(service, row["blob"], row["filename"], sha256=row["sha256"])


@file_router.delete("/{file_id}")
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


upload_router = APIRouter(prefix="/v1/uploads", tags=["Uploads"])
PART_BYTES = 64 * MIB
_PART_FORM = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string", "format": "binary"}}}


@upload_router.post("", openapi_extra=documented(CreateUpload))
def create_upload(
    request: Request, user: FilesUser, body: Annotated[CreateUpload, Depends(body_of(CreateUpload))]
) -> dict[str, Any]:
    """Announces a file of so many bytes; it must be complete within an hour."""
    service = service_of(request)
    check_purpose(body.purpose)
    allowance = allowance_of(service, user)
    if body.bytes > allowance.file_limit:
        message = f"The file is longer than {allowance.file_limit:,} bytes."
        raise ApiError(413, message, param="bytes", code="file_too_large")
    with service.database.begin() as tx:
        lock_tenant(tx, user.tenant)
        used = files.stored_bytes(tx, user.tenant) + files.pending_bytes(tx, user.tenant)
        if allowance.quota is not None and used + body.bytes > allowance.quota:
            raise over_quota(used, f"{body.bytes:,} more", allowance.quota)
        row = files.create_upload(
            tx,
            user.tenant,
            filename=clean_name(body.filename),
            purpose=body.purpose,
            bytes=body.bytes,
            keep_s=body.expires_after.seconds if body.expires_after else None,
        )
        user.note(tx, "upload.create", row["id"], {"bytes": body.bytes})
    return upload_object(row)


@upload_router.post(
    "/{upload_id}/parts",
    openapi_extra={"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _PART_FORM}}}},
)
async def add_part(request: Request, user: FilesUser, upload_id: str) -> dict[str, Any]:
    """Takes in a part; parts may come in any order and at once."""
    service = service_of(request)
    most = await run_in_threadpool(_part_allowance, service, user, upload_id)

    def too_large() -> Exception:
        message = f"The part is longer than {most:,} bytes, which is all the upload has room for."
        return ApiError(413, message, param="data", code="part_too_large")

    with await run_in_threadpool(service.blobs.create) as writer:
        await receive_file(request, writer, most=most, too_large=too_large, name="data")
        if writer.num_bytes == 0:
            raise invalid("The part is empty.", "data", "empty_file")
        return part_object(await run_in_threadpool(_keep_part, service, user, writer, upload_id))


@upload_router.post("/{upload_id}/complete", openapi_extra=documented(CompleteUpload))
def complete_upload(
    request: Request, user: FilesUser, upload_id: str, body: Annotated[CompleteUpload, Depends(body_of(CompleteUpload))]
) -> dict[str, Any]:
    """Makes a file of the parts, in the order given; a repeated request changes nothing."""
    service = service_of(request)
    try:
        _complete(service, user, upload_id, body)
    except (NotFound, NotPossible, Damaged):
        # The same request may have come before, or at the same moment, and then the parts may be gone.
        with service.database.read() as tx:
            if files.get_upload(tx, user.tenant, upload_id)["status"] != "completed":
                raise
    return _shown(service, user, upload_id)


@upload_router.post("/{upload_id}/cancel")
def cancel_upload(request: Request, user: FilesUser, upload_id: str) -> dict[str, Any]:
    """Forgets an upload and its parts."""
    service = service_of(request)
    with service.database.begin() as tx:
        row = files.get_upload(tx, user.tenant, upload_id, for_update=True)
        if row["status"] == "completed":
            raise NotPossible(f"Upload {upload_id} is completed; delete its file instead.", where="upload_id")
        parts = files.get_parts(tx, user.tenant, upload_id)
        if row["status"] == "pending":
            files.end_upload(tx, user.tenant, upload_id, "cancelled")
            user.note(tx, "upload.cancel", upload_id)
    discard(service.blobs, [part["blob"] for part in parts])
    return _shown(service, user, upload_id)


def _part_allowance(service: ApiService, user: Caller, id: str) -> int:
    allowance_of(service, user)
    with service.database.read() as tx:
        return min(PART_BYTES, _missing_bytes(tx, user, id))


def _missing_bytes(tx: Tx, user: Caller, id: str, *, for_update: bool = False) -> int:
    """Returns how many bytes an open upload still lacks."""
    upload = files.open_upload(tx, user.tenant, id, for_update=for_update)
    parts = files.get_parts(tx, user.tenant, id)
    if len(parts) >= MAX_UPLOAD_PARTS:
        raise NotPossible(f"Upload {id} has {MAX_UPLOAD_PARTS:,} parts and takes no more.", where="upload_id")
    return int(upload["bytes"] - sum(part["bytes"] for part in parts))


def _keep_part(service: ApiService, user: Caller, writer: BlobWriter, id: str) -> DbRow:
    with committed(service, writer), service.database.begin() as tx:
        # Two parts at once may each have been granted the same bytes.
        missing = _missing_bytes(tx, user, id, for_update=True)
        if writer.num_bytes > missing:
            raise invalid(f"The part has {writer.num_bytes:,} bytes; {missing:,} are missing.", "data", "too_long")
        return files.add_part(tx, user.tenant, id, bytes=writer.num_bytes, blob=writer.name)


def _complete(service: ApiService, user: Caller, id: str, body: CompleteUpload) -> None:
    with service.database.read() as tx:
        upload = files.open_upload(tx, user.tenant, id)
        every = files.get_parts(tx, user.tenant, id)
        parts = files.get_parts(tx, user.tenant, id, body.part_ids)
    if len(set(body.part_ids)) < len(parts):
        raise invalid("A part is named twice.", "part_ids", "invalid_value")
    total = sum(part["bytes"] for part in parts)
    if total != upload["bytes"]:
        message = f"The parts have {total:,} bytes; {upload['bytes']:,} were announced."
        raise invalid(message, "part_ids", "invalid_value")
    with service.blobs.create() as writer:
        try:
            digest = _join(service, parts, writer)
        except NotFound:
            raise Damaged("a part of an upload is gone.") from None
        if writer.num_bytes != total:
            raise Damaged(f"the parts of an upload have {writer.num_bytes:,} bytes and not {total:,}.")
        if body.md5 is not None and body.md5.lower() != digest:
            raise invalid(f"The MD5 of the parts is {digest}, not {body.md5}.", "md5", "checksum_mismatch")

        def end(tx: Tx, file: DbRow) -> None:
            files.open_upload(tx, user.tenant, id, for_update=True)
            files.end_upload(tx, user.tenant, id, "completed", file=file["id"])

        keep_file(service, user, writer, upload["filename"], upload["purpose"], upload["keep_s"], end)
    discard(service.blobs, [part["blob"] for part in every])


def _join(service: ApiService, parts: Sequence[DbRow], writer: BlobWriter) -> str:
    """Writes the parts one after another into a blob and returns the MD5 of all of them."""
    digest = hashlib.md5(usedforsecurity=False)
    for part in parts:
        with service.blobs.open(part["blob"]) as stream:
            while chunk := stream.read(CHUNK_BYTES):
                writer.write(chunk)
                digest.update(chunk)
    return digest.hexdigest()


def _shown(service: ApiService, user: Caller, id: str) -> dict[str, Any]:
    with service.database.read() as tx:
        row = files.get_upload(tx, user.tenant, id)
        try:
            file = files.get_file(tx, user.tenant, row["file"]) if row["file"] else None
        except NotFound:
            file = None
    return upload_object(row, file)
