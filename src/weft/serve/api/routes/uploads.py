"""/v1/uploads: a long file comes in parts; once completed it is a file like any other, checked by the same rules."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.concurrency import run_in_threadpool

from weft.serve.api.auth import Caller, FilesUser
from weft.serve.api.bodies.json_body import body_of, documented
from weft.serve.api.bodies.multipart import clean_name, receive_file
from weft.serve.api.bodies.requests import MAX_UPLOAD_PARTS, CompleteUpload, CreateUpload
from weft.serve.api.errors import ApiError, invalid
from weft.serve.api.responses import part_object, upload_object
from weft.serve.api.service import ApiService, service_of
from weft.serve.api.stored_files import allowance_of, check_purpose, committed, keep_file, over_quota
from weft.serve.blobs import CHUNK_BYTES, BlobWriter
from weft.serve.db.engine import Tx
from weft.serve.errors import NotFound, NotPossible
from weft.serve.records import files, uploads
from weft.serve.records.rows import DbRow
from weft.serve.settings import MIB

router = APIRouter(prefix="/v1/uploads", tags=["Uploads"])
PART_BYTES = 64 * MIB
_FORM = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string", "format": "binary"}}}


@router.post("", openapi_extra=documented(CreateUpload))
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
        used = files.stored_bytes(tx, user.tenant) + uploads.pending_bytes(tx, user.tenant)
        if allowance.quota is not None and used + body.bytes > allowance.quota:
            raise over_quota(used, f"{body.bytes:,} more", allowance.quota)
        row = uploads.create_upload(
            tx,
            user.tenant,
            filename=clean_name(body.filename),
            purpose=body.purpose,
            bytes=body.bytes,
            keep_s=body.expires_after.seconds if body.expires_after else None,
        )
        user.note(tx, "upload.create", row["id"], {"bytes": body.bytes})
    return upload_object(row)


@router.post(
    "/{upload_id}/parts",
    openapi_extra={"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}},
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


@router.post("/{upload_id}/complete", openapi_extra=documented(CompleteUpload))
def complete_upload(
    request: Request, user: FilesUser, upload_id: str, body: Annotated[CompleteUpload, Depends(body_of(CompleteUpload))]
) -> dict[str, Any]:
    """Makes a file of the parts, in the order given; asking twice is asking once."""
    service = service_of(request)
    try:
        _complete(service, user, upload_id, body)
    except (NotFound, NotPossible):
        # The same request may have come before, or at the same moment.
        with service.database.read() as tx:
            if uploads.get_upload(tx, user.tenant, upload_id)["status"] != "completed":
                raise
    return _shown(service, user, upload_id)


@router.post("/{upload_id}/cancel")
def cancel_upload(request: Request, user: FilesUser, upload_id: str) -> dict[str, Any]:
    """Forgets an upload and its parts."""
    service = service_of(request)
    with service.database.begin() as tx:
        row = uploads.get_upload(tx, user.tenant, upload_id, for_update=True)
        if row["status"] == "completed":
            raise NotPossible(f"Upload {upload_id} is completed; delete its file instead.", where="upload_id")
        parts = uploads.get_parts(tx, user.tenant, upload_id)
        if row["status"] == "pending":
            uploads.end_upload(tx, user.tenant, upload_id, "cancelled")
            user.note(tx, "upload.cancel", upload_id)
    _delete(service, parts)
    return _shown(service, user, upload_id)


def _part_allowance(service: ApiService, user: Caller, id: str) -> int:
    """Returns how many bytes the next part may have."""
    allowance_of(service, user)
    with service.database.read() as tx:
        return min(PART_BYTES, _missing_bytes(tx, user, id))


def _missing_bytes(tx: Tx, user: Caller, id: str, *, for_update: bool = False) -> int:
    """Returns how many bytes an open upload still lacks."""
    upload = uploads.open_upload(tx, user.tenant, id, for_update=for_update)
    parts = uploads.get_parts(tx, user.tenant, id)
    if len(parts) >= MAX_UPLOAD_PARTS:
        raise NotPossible(f"Upload {id} has {MAX_UPLOAD_PARTS:,} parts and takes no more.", where="upload_id")
    return int(upload["bytes"] - sum(part["bytes"] for part in parts))


def _keep_part(service: ApiService, user: Caller, writer: BlobWriter, id: str) -> DbRow:
    with committed(service, writer), service.database.begin() as tx:
        # Two parts at once may each have been granted the same bytes.
        missing = _missing_bytes(tx, user, id, for_update=True)
        if writer.num_bytes > missing:
            raise invalid(f"The part has {writer.num_bytes:,} bytes; {missing:,} are missing.", "data", "too_long")
        return uploads.add_part(tx, user.tenant, id, bytes=writer.num_bytes, blob=writer.name)


def _complete(service: ApiService, user: Caller, id: str, body: CompleteUpload) -> None:
    with service.database.read() as tx:
        upload = uploads.open_upload(tx, user.tenant, id)
        every = uploads.get_parts(tx, user.tenant, id)
        parts = uploads.get_parts(tx, user.tenant, id, body.part_ids)
    if len(set(body.part_ids)) < len(parts):
        raise invalid("A part is named twice.", "part_ids", "invalid_value")
    total = sum(part["bytes"] for part in parts)
    if total != upload["bytes"]:
        message = f"The parts have {total:,} bytes; {upload['bytes']:,} were announced."
        raise invalid(message, "part_ids", "invalid_value")
    with service.blobs.create() as writer:
        digest = _join(service, parts, writer)
        if body.md5 is not None and body.md5.lower() != digest:
            raise invalid(f"The MD5 of the parts is {digest}, not {body.md5}.", "md5", "checksum_mismatch")

        def end(tx: Tx, file: DbRow) -> None:
            uploads.open_upload(tx, user.tenant, id, for_update=True)
            uploads.end_upload(tx, user.tenant, id, "completed", file=file["id"])

        keep_file(service, user, writer, upload["filename"], upload["purpose"], upload["keep_s"], end)
    _delete(service, every)


def _join(service: ApiService, parts: Sequence[DbRow], writer: BlobWriter) -> str:
    """Writes the parts one after another into a blob and returns the MD5 of all of them."""
    digest = hashlib.md5(usedforsecurity=False)
    for part in parts:
        with service.blobs.open(part["blob"]) as stream:
            while chunk := stream.read(CHUNK_BYTES):
                writer.write(chunk)
                digest.update(chunk)
    return digest.hexdigest()


def _delete(service: ApiService, parts: Sequence[DbRow]) -> None:
    for part in parts:
        service.blobs.delete(part["blob"])


def _shown(service: ApiService, user: Caller, id: str) -> dict[str, Any]:
    with service.database.read() as tx:
        row = uploads.get_upload(tx, user.tenant, id)
        try:
            file = files.get_file(tx, user.tenant, row["file"]) if row["file"] else None
        except NotFound:
            file = None
    return upload_object(row, file)
