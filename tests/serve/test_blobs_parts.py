"""Stores that take an object in parts, as S3 does: it is there whole when the last part is, and else not at all."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from fsspec import register_implementation
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from weft.errors import StorageError
from weft.serve.blobs import Blobs
from weft.serve.errors import NotFound


class Parts(AbstractBufferedFile):
    """An upload in parts of `block_size` bytes, by the calls that fsspec makes on S3's own file."""

    def _initiate_upload(self) -> None:
        self.fs.calls.append("begin")
        self.parts: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        if len(self.parts) + 1 == self.fs.breaks_at:
            raise ConnectionError("the part did not arrive")
        self.parts.append(self.buffer.getvalue())
        self.fs.calls.append("part")
        if final:
            self.fs.calls.append("complete")
            self.fs.objects[self.path] = b"".join(self.parts)
        return True

    def discard(self) -> None:
        self.fs.calls.append("abort")

    def _fetch_range(self, start: int, end: int) -> bytes:
        return self.fs.objects[self.path][start:end]


class Bucket(AbstractFileSystem):
    """Objects by their keys; `calls` are the requests of an upload."""

    protocol = "parts"
    objects: ClassVar[dict[str, bytes]] = {}
    calls: ClassVar[list[str]] = []
    breaks_at: ClassVar[int | None] = None

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Parts:
        return Parts(self, path, mode, block_size=2**18, cache_type="none")

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        if path not in self.objects:
            raise FileNotFoundError(path)
        return {"name": path, "size": len(self.objects[path]), "type": "file"}

    def rm_file(self, path: str) -> None:
        if self.objects.pop(path, None) is None:
            raise FileNotFoundError(path)


@pytest.fixture
def blobs(monkeypatch: pytest.MonkeyPatch) -> Blobs:
    register_implementation("parts", Bucket, clobber=True)
    monkeypatch.setattr(Bucket, "objects", {})
    monkeypatch.setattr(Bucket, "calls", [])
    return Blobs("parts://bucket/weft")


DATA = bytes(range(256)) * 5_000
"""More than four parts."""


def test_object_when_written_in_parts_then_is_not_there_before_the_last_and_whole_after(blobs: Blobs):
    with blobs.create(".bin") as writer:
        for start in range(0, len(DATA), 100_000):
            writer.write(DATA[start : start + 100_000])
        assert "part" in Bucket.calls and Bucket.objects == {}
        with pytest.raises(NotFound):
            blobs.open(writer.name)
        writer.commit()
    assert Bucket.calls[0] == "begin" and Bucket.calls.count("complete") == 1 and "abort" not in Bucket.calls
    with blobs.open(writer.name) as stream:
        assert stream.read() == DATA
    assert blobs.size(writer.name) == len(DATA)


def test_object_when_the_writer_goes_away_then_its_parts_are_given_up_and_nothing_appears(blobs: Blobs):
    with blobs.create() as writer:
        writer.write(DATA)
    del writer
    assert Bucket.calls[-1] == "abort" and "complete" not in Bucket.calls and Bucket.objects == {}


@pytest.mark.parametrize("part", [1, 3, 5])
def test_object_when_a_part_does_not_arrive_then_a_storage_error_and_nothing_appears(
    blobs: Blobs, monkeypatch: pytest.MonkeyPatch, part: int
):
    monkeypatch.setattr(Bucket, "breaks_at", part)
    pieces = (DATA[start : start + 100_000] for start in range(0, len(DATA), 100_000))
    with pytest.raises(StorageError, match=r"\(the part did not arrive\)"):
        blobs.put(pieces)
    assert Bucket.calls.count("part") == part - 1
    assert Bucket.calls[-1] == "abort" and Bucket.objects == {}
