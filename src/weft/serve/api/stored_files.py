"""What several routes do with files of the file store: keep uploads, send blobs, find a job's training file."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO
from urllib.parse import quote

from fastapi.responses import StreamingResponse

from weft.serve.api.auth import Caller
from weft.serve.api.errors import ApiError, invalid
from weft.serve.api.service import ApiService
from weft.serve.blobs import CHUNK_BYTES, BlobWriter
from weft.serve.db.engine import Tx
from weft.serve.errors import NotFound, OverLimit, Unsure
from weft.serve.jobs.training_file import Report, check_training_file
from weft.serve.records import files
from weft.serve.records.rows import DbRow
from weft.wording import counted

PURPOSE = "fine-tune"
"""The one purpose of a file that the API takes."""


def check_purpose(purpose: str) -> None:
    """Raises a 400 unless the purpose is the one there is."""
    if purpose != PURPOSE:
        raise invalid(f"{purpose[:40]!r} is not a purpose here; use '{PURPOSE}'.", "purpose", "invalid_value")


@dataclass(frozen=True)
class FileAllowance:
    """How long a tenant's next file may be, and the error for a longer one."""

    file_limit: int
    used: int = 0
    quota: int | None = None

    @property
    def most(self) -> int:
        """The most bytes the file may have."""
        return self.file_limit if self.quota is None else min(self.file_limit, max(0, self.quota - self.used))

    def refusal(self) -> Exception:
        """Makes the error for a longer file."""
        if self.most < self.file_limit:
            return over_quota(self.used, "this file", self.quota or 0)
        message = f"The file is longer than {self.file_limit:,} bytes."
        return ApiError(413, message, param="file", code="file_too_large")


def allowance_of(service: ApiService, user: Caller) -> FileAllowance:
    """Returns how much the tenant may still store; raises a 507 where the disk is nearly full."""
    limits, quota = service.settings.limits, user.owner["max_stored_bytes"]
    free = service.blobs.free_bytes()
    if free is not None and free < limits.disk_floor_bytes:
        message = "The disk of the file store is nearly full; uploads are refused."
        headers = {"x-should-retry": "false"}
        raise ApiError(507, message, code="storage_full", type="server_error", headers=headers)
    if quota is None:
        return FileAllowance(limits.file_bytes)
    with service.database.read() as tx:
        return FileAllowance(limits.file_bytes, files.stored_bytes(tx, user.tenant), quota)


def over_quota(used: int, wanted: str, quota: int) -> OverLimit:
    """Makes the error for something that would pass the storage quota, with the figures."""
    return OverLimit(
        f"Storage is used up: {used:,} bytes are stored and {wanted} would pass the limit of {quota:,}. "
        "Delete files or models first."
    )


def _chunks(stream: IO[bytes]) -> Iterator[bytes]:
    with stream:
        while chunk := stream.read(CHUNK_BYTES):
            yield chunk


def find_training_file(service: ApiService, user: Caller, id: str, param: str) -> DbRow:
    """Finds a file of the tenant for a job to train on; a missing file and another tenant's get the same 400."""
    try:
        with service.database.read() as tx:
            return files.get_file(tx, user.tenant, id)
    except NotFound:
        hint = "" if id.startswith("file-") else " Send the id of an uploaded file, such as file-abc123."
        raise invalid(f"File '{id}' does not exist.{hint}", param, "file_not_found") from None


def download(
    service: ApiService, blob: str, filename: str, kind: str = "application/octet-stream"
) -> StreamingResponse:
    """Answers with a blob in such a way that browsers save it and never show it."""
    stream = service.blobs.open(blob)
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", filename)
    headers = {
        "content-disposition": f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(filename, safe='')}",
        "content-length": str(service.blobs.size(blob)),
        "x-content-type-options": "nosniff",
    }
    return StreamingResponse(_chunks(stream), media_type=kind, headers=headers)


def refuse_problems(report: Report, param: str) -> None:
    """Raises a 400 that lists the wrong lines, if there are any."""
    if report.problems:
        first, rest = report.problems[0], len(report.problems) - 1
        more = f" (and {counted(rest, 'more problem')})" if rest else ""
        problems = [{"line": p.line, "message": p.message} for p in report.problems]
        raise invalid(first.message + more, param, "invalid_training_file", problems=problems)


def keep_file(
    service: ApiService,
    user: Caller,
    writer: BlobWriter,
    filename: str,
    purpose: str,
    expires_in_s: int | None,
    also: Callable[[Tx, DbRow], object] = lambda tx, file: None,
) -> DbRow:
    """Checks the lines of a file and makes its row; nothing is left of a file that is refused.

    `also` is called in the transaction that makes the row.
    """
    with committed(service, writer):
        with service.blobs.open(writer.name) as stream:
            report = check_training_file(stream, filename, service.settings.limits, data_format=None)
        refuse_problems(report, "file")
        with service.database.begin() as tx:
            # Two uploads at once may each have been granted the same bytes.
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
def committed(service: ApiService, writer: BlobWriter) -> Iterator[None]:
    """Commits a blob; the block makes the row that names it, and if that fails the blob is deleted."""
    writer.commit()
    try:
        yield
    except Unsure:
        # The row may be there. If it is not, nothing names the blob, and the daily clean-up deletes it.
        raise
    except BaseException:
        service.blobs.delete(writer.name)
        raise
