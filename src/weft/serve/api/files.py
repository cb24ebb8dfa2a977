"""/v1/files: training files in, result files out."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Annotated, Any, Literal
from urllib.parse import quote

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from weft.serve.api.auth import Caller, needs
from weft.serve.api.errors import ApiError, invalid
from weft.serve.api.multipart import Form, receive_file
from weft.serve.api.service import Service, service_of
from weft.serve.api.shapes import deleted, file_object, listed
from weft.serve.blobs import CHUNK_BYTES, BlobWriter
from weft.serve.db.engine import Tx
from weft.serve.errors import OverLimit, Unsure
from weft.serve.jobs.training_file import Report, check_training_file
from weft.serve.records import files
from weft.serve.records.rows import Record
from weft.serve.tidy import discard
from weft.spec.fields import describe

router = APIRouter(prefix="/v1/files", tags=["Files"])
User = Annotated[Caller, Depends(needs("files"))]
PURPOSE = "fine-tune"
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
async def upload(request: Request, user: User) -> dict[str, Any]:
    """Takes in a training file: JSON lines, checked before it is kept."""
    service = service_of(request)
    room = await run_in_threadpool(room_of, service, user)
    with await run_in_threadpool(service.blobs.create) as writer:
        form = await receive_file(request, writer, most=room.most, too_large=room.refusal)
        expires_in_s = _check_form(form)
        if writer.num_bytes == 0:
            raise invalid(f"{form.filename}: is empty.", "file", "empty_file")
        purpose = form.fields["purpose"]
        row = await run_in_threadpool(keep_file, service, user, writer, form.filename, purpose, expires_in_s)
    return file_object(row)


@router.get("")
def list_files(
    request: Request,
    user: User,
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
def retrieve_file(request: Request, user: User, file_id: str) -> dict[str, Any]:
    """One file's row."""
    with service_of(request).database.read() as tx:
        return file_object(files.get_file(tx, user.tenant, file_id))


@router.get("/{file_id}/content", response_class=StreamingResponse)
def file_content(request: Request, user: User, file_id: str) -> StreamingResponse:
    """The bytes of a file."""
    service = service_of(request)
    with service.database.read() as tx:
        row = files.get_file(tx, user.tenant, file_id)
    return download(service, row["blob"], row["filename"])


@router.delete("/{file_id}")
def delete_file(request: Request, user: User, file_id: str) -> dict[str, Any]:
    """Forgets a file; jobs that have begun with it go on."""
    service = service_of(request)
    with service.database.begin() as tx:
        row = files.delete_file(tx, user.tenant, file_id)
        user.note(tx, "file.delete", file_id)
        in_use = files.is_needed(tx, user.tenant, file_id)
    if not in_use:
        discard(service.blobs, [row["blob"]])
    return deleted(file_id, "file")


def download(service: Service, blob: str, filename: str, kind: str = "application/octet-stream") -> StreamingResponse:
    """A blob as an answer that browsers save and never show."""
    stream = service.blobs.open(blob)
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", filename)
    headers = {
        "content-disposition": f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(filename, safe='')}",
        "content-length": str(service.blobs.size(blob)),
        "x-content-type-options": "nosniff",
    }
    return StreamingResponse(_chunks(stream), media_type=kind, headers=headers)


def refuse_problems(report: Report, param: str) -> None:
    """A 400 with the lines that are wrong, if any are."""
    if report.problems:
        first, rest = report.problems[0], len(report.problems) - 1
        more = f" (and {rest} more problem{'s' if rest > 1 else ''})" if rest else ""
        problems = [{"line": p.line, "message": p.message} for p in report.problems]
        raise invalid(first.message + more, param, "invalid_training_file", problems=problems)


def keep_file(
    service: Service,
    user: Caller,
    writer: BlobWriter,
    filename: str,
    purpose: str,
    expires_in_s: int | None,
    also: Callable[[Tx, Record], object] = lambda tx, file: None,
) -> Record:
    """Checks the lines, then makes blob and row last; nothing is left of a file that is refused.

    `also` happens in the transaction that makes the row.
    """
    with committed(service, writer):
        with service.blobs.open(writer.name) as stream:
            report = check_training_file(stream, filename, service.settings.limits, data_format=None)
        refuse_problems(report, "file")
        with service.database.begin() as tx:
            # Two uploads at once were each promised the same room.
            used, quota = files.stored_bytes(tx, user.tenant), user.owner["max_stored_bytes"]
            if quota is not None and used + writer.num_bytes > quota:
                raise over_quota(used, f"{writer.num_bytes:,} more", quota)
            row = files.create_file(
                tx,
                user.tenant,
                filename=filename,
                purpose=purpose,
                bytes=writer.num_bytes,
                sha256=writer.sha256,
                blob=writer.name,
                expires_in_s=expires_in_s,
            )
            user.note(tx, "file.create", row["id"], {"bytes": writer.num_bytes})
            also(tx, row)
    service.metrics.uploaded.inc(writer.num_bytes)
    return row


@contextlib.contextmanager
def committed(service: Service, writer: BlobWriter) -> Iterator[None]:
    """The blob is there; inside a row is made that names it, and without that row it goes again."""
    writer.commit()
    try:
        yield
    except Unsure:
        # The row may be there. If it is not, nobody names the blob, and `tidy` removes it in time.
        raise
    except BaseException:
        service.blobs.delete(writer.name)
        raise


def _check_form(form: Form) -> int | None:
    """The form's fields are right; returns the seconds the file is kept, if it is not for good."""
    purpose = form.fields.get("purpose")
    if purpose is None:
        raise invalid("Missing required parameter: 'purpose'.", "purpose", "missing_required_parameter")
    if purpose != PURPOSE:
        raise invalid(f"{purpose[:40]!r} is not a purpose here; use '{PURPOSE}'.", "purpose", "invalid_value")
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


@dataclass(frozen=True)
class Room:
    """How long a file may be, and what to say of a longer one."""

    file_limit: int
    used: int = 0
    quota: int | None = None

    @property
    def most(self) -> int:
        """Bytes a file may have."""
        return self.file_limit if self.quota is None else min(self.file_limit, max(0, self.quota - self.used))

    def refusal(self) -> Exception:
        """What a longer file gets."""
        if self.most < self.file_limit:
            return over_quota(self.used, "this file", self.quota or 0)
        message = f"The file is longer than {self.file_limit:,} bytes."
        return ApiError(413, message, param="file", code="file_too_large")


def room_of(service: Service, user: Caller) -> Room:
    """What the tenant may still store; refused where the disk is nearly full."""
    limits, quota = service.settings.limits, user.owner["max_stored_bytes"]
    free = service.blobs.free_bytes()
    if free is not None and free < limits.disk_floor_bytes:
        message = "The disk of the file store is nearly full; uploads are refused."
        headers = {"x-should-retry": "false"}
        raise ApiError(507, message, code="storage_full", type="server_error", headers=headers)
    if quota is None:
        return Room(limits.file_bytes)
    with service.database.read() as tx:
        return Room(limits.file_bytes, files.stored_bytes(tx, user.tenant), quota)


def over_quota(used: int, wanted: str, quota: int) -> OverLimit:
    """The arithmetic of a storage quota that something would pass."""
    return OverLimit(
        f"Storage is used up: {used:,} bytes are stored and {wanted} would pass the limit of {quota:,}. "
        "Delete files or models first."
    )


def _chunks(stream: IO[bytes]) -> Iterator[bytes]:
    with stream:
        while chunk := stream.read(CHUNK_BYTES):
            yield chunk


def find_training_file(service: Service, user: Caller, id: str, param: str) -> Record:
    """A file of the tenant that a job may train on; a missing one and a foreign one are the same 400."""
    from weft.serve.errors import NotFound

    try:
        with service.database.read() as tx:
            return files.get_file(tx, user.tenant, id)
    except NotFound:
        hint = "" if id.startswith("file-") else " Send the id of an uploaded file, such as file-abc123."
        raise invalid(f"File '{id}' does not exist.{hint}", param, "file_not_found") from None
