"""Blobs are whole or not there, under names of our own, in directories and at URLs."""

from __future__ import annotations

import hashlib
import io
import sys
import zipfile
from pathlib import Path
from typing import ClassVar

import pytest
from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem

from weft.errors import ConfigError, MissingExtraError, StorageError
from weft.serve.blobs import Blobs
from weft.serve.errors import NotFound
from weft.store import faults


@pytest.fixture(params=["directory", "url"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Blobs:
    return Blobs(str(tmp_path / "blobs") if request.param == "directory" else f"memory://{tmp_path.name}")


def test_blob_when_put_then_read_copied_and_deleted(blobs: Blobs, tmp_path: Path):
    data = bytes(range(256)) * 10_000
    for stream in (data, io.BytesIO(data), iter([data[:7], data[7:]])):
        name = blobs.put(stream, ".bin")
        with blobs.open(name) as file:
            assert file.read() == data
        assert blobs.size(name) == len(data)
        blobs.fetch(name, tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == data
        blobs.delete(name)
        blobs.delete(name)
        for gone in (blobs.open, blobs.size):
            with pytest.raises(NotFound):
                gone(name)


def test_writer_when_not_committed_then_nothing_is_left(blobs: Blobs):
    with blobs.create() as writer:
        writer.write(b"hello")
        assert writer.num_bytes == 5
        assert writer.sha256 == hashlib.sha256(b"hello").hexdigest()
    with pytest.raises(NotFound):
        blobs.open(writer.name)


def test_directory_when_put_then_an_archive_that_is_always_the_same(blobs: Blobs, tmp_path: Path):
    home = tmp_path / "adapter"
    home.mkdir()
    (home / "adapter_config.json").write_text("{}")
    (home / "adapter_model.safetensors").write_bytes(b"\0" * 100)
    contents = []
    for _ in range(2):
        with blobs.open(blobs.put_dir(home)) as file:
            contents.append(file.read())
    assert contents[0] == contents[1]
    with zipfile.ZipFile(io.BytesIO(contents[0])) as archive:
        assert archive.namelist() == ["adapter_config.json", "adapter_model.safetensors"]
        assert archive.testzip() is None


@pytest.mark.parametrize("name", ["", "..", "../x", "/etc/passwd", "ab/../../x", "ab/" + "0" * 31, "AB/" + "0" * 32])
def test_name_when_not_ours_then_has_no_location(blobs: Blobs, name: str):
    for use in (blobs.open, blobs.delete, blobs.size):
        with pytest.raises(NotFound):
            use(name)


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_disk_when_full_then_a_storage_error_and_nothing_is_left(tmp_path: Path, at: int):
    blobs = Blobs(str(tmp_path))
    faults.arm(faults.parse(f"enospc@{at}"))
    try:
        with pytest.raises(StorageError, match="full"):
            blobs.put(iter([b"a", b"b"]))
    finally:
        faults.disarm()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert blobs.put(b"a")


def test_url_when_unknown_then_one_sentence():
    with pytest.raises(ConfigError, match="'nonsense://x' is not a file store"):
        Blobs("nonsense://x")


def test_url_when_its_package_is_missing_then_reports_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(MissingExtraError, match=r"pip install -e '.*\[s3\]'"):
        Blobs("s3://bucket/prefix")


def test_url_when_of_files_then_is_that_directory(tmp_path: Path):
    name = Blobs(f"file://{tmp_path}/blobs").put(b"hello")
    assert (tmp_path / "blobs" / name).read_bytes() == b"hello"


class AwayError(Exception):
    """As libraries of object stores raise: no OSError."""


class Flaky(MemoryFileSystem):
    """A store that goes away on request."""

    protocol = "flaky"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]
    is_away = False

    def _open(self, path, mode="rb", **options):
        check()
        file = super()._open(path, mode, **options)
        if mode == "rb":
            file.read = lambda size=-1: check() or type(file).read(file, size)
        return file

    def info(self, path, **options):
        return check() or super().info(path, **options)

    def rm_file(self, path):
        return check() or super().rm_file(path)

    def find(self, path, **options):
        return check() or super().find(path, **options)


def check() -> None:
    if Flaky.is_away:
        raise AwayError("no route to the bucket")


def test_store_when_it_goes_away_then_a_storage_error_whatever_the_library_raised(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    register_implementation("flaky", Flaky, clobber=True)
    blobs = Blobs("flaky://home")
    name = blobs.put(b"hello")
    stream = blobs.open(name)
    monkeypatch.setattr(Flaky, "is_away", True)
    uses = {
        "put": lambda: blobs.put(b"x"),
        "open": lambda: blobs.open(name),
        "read": stream.read,
        "size": lambda: blobs.size(name),
        "delete": lambda: blobs.delete(name),
        "names": lambda: list(blobs.names()),
        "fetch": lambda: blobs.fetch(name, tmp_path / "copy"),
    }
    for use in uses.values():
        with pytest.raises(StorageError, match=r"does not answer \(AwayError: no route to the bucket\)"):
            use()
    monkeypatch.setattr(Flaky, "is_away", False)
    assert [found for found, _ in blobs.names()] == [name]
    with pytest.raises(StorageError, match="no such directory"):
        blobs.fetch(name, tmp_path / "nowhere" / "copy")
