"""Compressed files are read like the files inside them, and damaged ones are refused in a sentence."""

from __future__ import annotations

import gzip
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from weft.data.sources import read_rows
from weft.errors import DataError, MissingExtraError

ROWS = b'{"text": "a"}\n\n{"text": "b"}\n'
Compress = Callable[[bytes], bytes]


def zst(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


COMPRESSED: dict[str, Compress] = {".gz": gzip.compress, ".zst": zst}


@pytest.mark.parametrize("suffix", COMPRESSED)
@pytest.mark.parametrize(
    ("kind", "content"),
    [
        (".jsonl", ROWS),
        (".ndjson", ROWS),
        (".json", b'[{"text": "a"}, {"text": "b"}]'),
        (".csv", b"text,x\na,1\nb,2\n"),
        (".tsv", b"text\tx\na\t1\nb\t2\n"),
        (".txt", b"a\n\nb\n"),
    ],
)
def test_compressed_file_when_read_then_rows_and_lines_are_those_inside(
    kind: str, content: bytes, suffix: str, tmp_path: Path
):
    (tmp_path / f"rows{kind}").write_bytes(content)
    (tmp_path / f"rows{kind}{suffix}").write_bytes(COMPRESSED[suffix](content))
    plain, packed = (read_rows(f"rows{kind}{end}", tmp_path) for end in ("", suffix))
    assert [row.values for row in packed] == [row.values for row in plain]
    assert [row.where for row in packed] == [row.where.replace(kind, kind + suffix) for row in plain]


@pytest.mark.parametrize("suffix", COMPRESSED)
def test_compressed_file_when_it_has_several_parts_then_all_are_read(suffix: str, tmp_path: Path):
    """Programs that compress on many cores, and `cat a.gz b.gz`, make files of several parts."""
    many = b"".join(b'{"text": "%d"}\n' % i for i in range(40_000))
    (tmp_path / f"rows.jsonl{suffix}").write_bytes(COMPRESSED[suffix](many) + COMPRESSED[suffix](ROWS))
    rows = read_rows(f"rows.jsonl{suffix}", tmp_path)
    assert len(rows) == 40_002
    assert rows[-1].where == f"rows.jsonl{suffix} line 40003"


@pytest.mark.parametrize("suffix", COMPRESSED)
@pytest.mark.parametrize("damage", ["cut", "other bytes", "flipped"])
def test_compressed_file_when_it_is_damaged_then_is_a_data_error(damage: str, suffix: str, tmp_path: Path):
    """A file that breaks off is never taken for a shorter one."""
    whole = COMPRESSED[suffix](b"".join(b'{"text": "%x"}\n' % (i * i) for i in range(1000)))
    changed = bytes([whole[len(whole) // 2] ^ 0xFF])
    half = len(whole) // 2
    data = {"cut": whole[:-5], "other bytes": b"no archive", "flipped": whole[:half] + changed + whole[half + 1 :]}
    (tmp_path / f"rows.jsonl{suffix}").write_bytes(data[damage])
    with pytest.raises(DataError) as caught:
        read_rows(f"rows.jsonl{suffix}", tmp_path)
    assert str(caught.value).startswith(f"rows.jsonl{suffix}")


def test_zst_file_when_the_package_is_missing_then_explains_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "rows.jsonl.zst").write_bytes(zst(ROWS))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(MissingExtraError, match=r"^rows\.jsonl\.zst: reading \.zst files needs zstandard.*\[zstd\]"):
        read_rows("rows.jsonl.zst", tmp_path)


def test_compressed_file_when_what_is_inside_is_no_text_then_is_refused(tmp_path: Path):
    for name in ("rows.parquet.gz", "rows.gz", "rows.tar.gz"):
        (tmp_path / name).write_bytes(gzip.compress(ROWS))
        with pytest.raises(DataError, match=r"has the suffix '.*gz'; accepted are \.jsonl"):
            read_rows(name, tmp_path)
