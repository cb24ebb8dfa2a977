"""Parses an upload as it arrives: the file goes to the file store chunk by chunk and is never whole in memory.

Its bytes are counted as they come. The user's file name is only a label: it is cleaned of characters that could upset
a terminal or a page, and it is never part of a path.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from weft.serve.api.errors import invalid
from weft.serve.blobs import BlobWriter

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
