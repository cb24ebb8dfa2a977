"""A digest is remembered only for a file that is sure to be the same, and never believed without a whole record."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from weft.data.prepared import key
from weft.data.prepared.key import RECORD, FileDigests, file_digest

LATER_S = 100.0


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"a" * 2**20)
    return path


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Every file that is read to be hashed."""
    read: list[Path] = []
    monkeypatch.setattr(key, "file_digest", lambda path: read.append(path) or file_digest(path))
    return read


def digests(folder: Path, file: Path, later_s: float = LATER_S) -> FileDigests:
    """The record as a process sees it so long after the file changed."""
    return FileDigests(folder / "cache", lambda: file.stat().st_ctime + later_s)


def remember(folder: Path, file: Path, later_s: float = LATER_S) -> str:
    known = digests(folder, file, later_s)
    found = known.of(file)
    known.save()
    return found


def test_digest_when_the_file_is_untouched_then_it_is_not_read_again(tmp_path: Path, file: Path, hashed: list[Path]):
    """Also by another process."""
    assert remember(tmp_path, file) == file_digest(file)
    assert digests(tmp_path, file).of(file) == file_digest(file)
    assert hashed == [file]


def _rewrite(file: Path) -> None:
    before = file.stat()
    file.write_bytes(b"b" * 2**20)
    # The file system's clock may tick no more than every few milliseconds.
    while file.stat().st_ctime_ns == before.st_ctime_ns or file.stat().st_mtime_ns != before.st_mtime_ns:
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def _replace(file: Path) -> None:
    before, other = file.stat(), file.with_name("other")
    other.write_bytes(b"b" * 2**20)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(other, file)


@pytest.mark.parametrize("change", [_rewrite, _replace])
def test_digest_when_another_file_has_its_size_and_time_then_it_is_read_again(
    change: Callable[[Path], None], tmp_path: Path, file: Path
):
    remember(tmp_path, file)
    change(file)
    assert digests(tmp_path, file).of(file) == file_digest(file)


@pytest.mark.parametrize("later_s", [1.9, 0.0, -3600.0])
def test_digest_when_the_file_changed_a_moment_ago_then_it_is_not_remembered(
    later_s: float, tmp_path: Path, file: Path, hashed: list[Path]
):
    """Nor where its time lies in the future."""
    remember(tmp_path, file, later_s)
    remember(tmp_path, file)
    assert len(hashed) == 2


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"files": 3, "sha256": 3}'])
def test_record_when_it_is_broken_then_is_made_again(damage: bytes, tmp_path: Path, file: Path, hashed: list[Path]):
    remember(tmp_path, file)
    record = tmp_path / "cache" / RECORD
    whole = record.read_bytes()
    record.write_bytes(damage)
    assert remember(tmp_path, file) == file_digest(file)
    assert (len(hashed), record.read_bytes()) == (2, whole)


def test_record_when_a_digest_in_it_is_changed_then_nothing_in_it_is_believed(tmp_path: Path, file: Path):
    found = remember(tmp_path, file)
    record = tmp_path / "cache" / RECORD
    record.write_text(record.read_text().replace(found, "0" * 64))
    assert digests(tmp_path, file).of(file) == found


def test_record_when_it_cannot_be_written_then_digests_are_those_of_the_files(tmp_path: Path, file: Path):
    (tmp_path / "cache").write_text("in the way")
    assert remember(tmp_path, file) == file_digest(file)


def test_record_when_two_processes_add_to_it_then_both_are_kept(tmp_path: Path, file: Path, hashed: list[Path]):
    other = file.with_name("other.jsonl")
    other.write_bytes(b"c" * 2**20)
    one, two = digests(tmp_path, other), digests(tmp_path, other)
    one.of(file), two.of(other)
    one.save(), two.save()
    assert digests(tmp_path, file).of(file) and digests(tmp_path, file).of(other)
    assert len(hashed) == 2
