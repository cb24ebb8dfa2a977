"""What several routes do with files of the file store: receive uploads, send blobs, find a job's training file.

An upload is parsed as it arrives: the file goes to the file store chunk by chunk and is never whole in memory. Its
bytes are counted as they come. The user's file name is only a label: it is cleaned of characters that could upset a
terminal or a page, and it is never part of a path.
"""

from __future__ import annotations

import contextlib
import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any
from urllib.parse import quote

from fastapi.responses import StreamingResponse
from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from weft.errors import counted
from weft.serve.api.errors import ApiError, invalid
from weft.serve.api.service import ApiService, Caller
from weft.serve.blobs import CHUNK_BYTES, BlobWriter
from weft.serve.db import files
from weft.serve.db.engine import DbRow, Tx
from weft.serve.db.usage import lock_tenant
from weft.serve.errors import NotFound, OverLimit, Unsure
from weft.serve.new_job import Report, check_training_file

PURPOSE = "fine-tune"


def check_purpose(purpose: str) -> None:
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
        return self.file_limit if self.quota is None else min(self.file_limit, max(0, self.quota - self.used))

    def refusal(self) -> Exception:
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
    service: ApiService, blob: str, filename: str, kind: str = "application/octet-stream", sha256: str | None = None
) -> StreamingResponse:
    """Answers with a blob in such a way that browsers save it and never show it; an archive has no `sha256`. It is read
    once before the answer begins, because a status cannot be taken back."""
    if sha256 is None:
        service.blobs.check_archive(blob)
    else:
        service.blobs.check(blob, sha256)
    stream = service.blobs.open(blob)
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", filename)
    headers = {
        "content-disposition": f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(filename, safe='')}",
        "content-length": str(service.blobs.size(blob)),
        "x-content-type-options": "nosniff",
    }
    return StreamingResponse(_chunks(stream), media_type=kind, headers=headers)


def refuse_problems(report: Report, param: str) -> None:
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
    """Checks the lines of a file and makes its row; nothing is left of a file that is refused. `also` is called in the
    transaction that makes the row."""
    with committed(service, writer):
        with service.blobs.open(writer.name) as stream:
            report = check_training_file(stream, filename, service.settings.limits, data_format=None)
        refuse_problems(report, "file")
        with service.database.begin() as tx:
            # Two uploads at once may each have been granted the same bytes; one of them waits here.
            lock_tenant(tx, user.tenant)
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


MAX_FIELD_BYTES = 4096
MAX_PARTS = 20
MAX_NAME_CHARS = 255
_OVERHEAD_BYTES = 64 * 1024
"""How many bytes the form may have besides those of its file."""


@dataclass
class UploadForm:
    """A complete form: its text fields, and the name of the file whose bytes are in the blob."""

    fields: dict[str, str]
    filename: str


@dataclass
class _FormPart:
    name: str = ""
    filename: str | None = None
    data: bytearray = field(default_factory=bytearray)


class _FormReader:
    """The parser's callbacks; bytes of the part named `file` are collected in `pending` until the loop writes them."""

    def __init__(self, file: str) -> None:
        self._file = file
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.pending: list[bytes] = []
        self.is_complete = False
        self._part = _FormPart()
        self._header = [bytearray(), bytearray()]
        self._num_parts = 0

    def on_part_begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise invalid(f"The form has more than {MAX_PARTS} parts.", code="invalid_form")
        self._part = _FormPart()

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._grow(self._header[0], data[start:end])

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._grow(self._header[1], data[start:end])

    def on_header_end(self) -> None:
        name, value = bytes(self._header[0]).lower(), bytes(self._header[1])
        self._header = [bytearray(), bytearray()]
        if name == b"content-disposition":
            _, options = parse_options_header(value)
            self._part.name = _text(options.get(b"name", b""))
            if b"filename" in options:
                self._part.filename = _text(options[b"filename"])

    def on_headers_finished(self) -> None:
        if self._part.name == self._file:
            if self.filename is not None:
                raise invalid("The form has two files; send one.", self._file, "invalid_form")
            self.filename = clean_name(self._part.filename or "")

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._part.name == self._file:
            self.pending.append(data[start:end])
        else:
            self._grow(self._part.data, data[start:end])

    def on_part_end(self) -> None:
        if self._part.name and self._part.name != self._file:
            text = _text(bytes(self._part.data))
            if "\0" in text:
                raise invalid("holds a NUL character.", self._part.name, "invalid_value")
            self.fields[self._part.name[:100]] = text

    def on_end(self) -> None:
        self.is_complete = True

    def _grow(self, target: bytearray, data: bytes) -> None:
        target += data
        if len(target) > MAX_FIELD_BYTES:
            raise invalid(f"A field of the form is longer than {MAX_FIELD_BYTES:,} bytes.", code="invalid_form")


async def receive_file(
    request: Request, writer: BlobWriter, *, most: int, too_large: Callable[[], Exception], name: str = "file"
) -> UploadForm:
    """Streams the part of a form named `name` into a blob; more than `most` bytes raise the error of `too_large`."""
    reader = _FormReader(name)
    parser = MultipartParser(_boundary(request), _callbacks(reader))
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > most + _OVERHEAD_BYTES:
                raise too_large()
            parser.write(chunk)
            if reader.pending:
                data = b"".join(reader.pending)
                reader.pending.clear()
                if writer.num_bytes + len(data) > most:
                    raise too_large()
                await run_in_threadpool(writer.write, data)
        parser.finalize()
    except MultipartParseError as error:
        raise invalid(f"The form cannot be read ({error}).", code="invalid_form") from None
    if not reader.is_complete:
        raise invalid("The form ends in the middle.", code="invalid_form")
    if reader.filename is None:
        raise invalid(f"Missing required parameter: '{name}'.", name, "missing_required_parameter")
    return UploadForm(reader.fields, reader.filename)


def clean_name(name: str) -> str:
    """Makes a label of a file name: its last component, shortened, without control and direction characters."""
    last = name.replace("\\", "/").rsplit("/", 1)[-1]
    # Cc: control, Cf: format such as right-to-left override, Cs: halves of surrogate pairs, Co/Cn: unassigned.
    kept = "".join(c for c in last if unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Co", "Cn")).strip()
    return kept[:MAX_NAME_CHARS] if kept.strip(". ") else "upload"


def _boundary(request: Request) -> bytes:
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 0 < len(boundary) <= 200:
        raise invalid("Send the file as multipart/form-data.", "file", "invalid_form")
    return boundary


def _callbacks(reader: _FormReader) -> Any:
    names = ("part_begin", "part_data", "part_end", "header_field", "header_value", "header_end", "headers_finished")
    return {f"on_{name}": getattr(reader, f"on_{name}") for name in (*names, "end")}


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
