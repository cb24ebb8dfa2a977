"""Blobs are whole or not there, under names of our own, in directories and behind URLs."""

from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path

import pytest

from weft import faults
from weft.errors import ConfigError, MissingExtraError, StorageError
from weft.serve.blobs import Blobs
from weft.serve.errors import NotFound


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
def test_name_when_not_ours_then_has_no_place(blobs: Blobs, name: str):
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
    with pytest.raises((ConfigError, MissingExtraError)):
        Blobs("nonsense://x")
