"""Names of folders, patterns and saved data sets become the files they stand for, in one order on every machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from weft.data.sources import find_source, read_rows
from weft.errors import DataError

Write = Callable[..., str]
ACCEPTED = ".jsonl, .ndjson, .json, .csv, .tsv, .parquet, .arrow, .txt, and text files with .gz or .zst added"


def error_of(name: str, directory: Path) -> str:
    with pytest.raises(DataError) as caught:
        read_rows(name, directory)
    return str(caught.value)


@pytest.fixture
def folder(write: Write, tmp_path: Path) -> Path:
    """A folder of data files between others, some of them deeper."""
    (tmp_path / "data" / "more").mkdir(parents=True)
    for name in ("b.jsonl", "a.jsonl", "more/c.jsonl"):
        write(f"data/{name}", [{"text": name}, {"text": f"{name} again"}])
    for name in ("README.md", ".hidden.jsonl", "_SUCCESS.json"):
        write(f"data/{name}", "no data")
    return tmp_path


@pytest.mark.parametrize("name", ["data", "data/", "data/*.jsonl", "data/[ab].jsonl"])
def test_folder_or_pattern_when_read_then_files_follow_in_order_and_rows_name_theirs(name: str, folder: Path):
    """However they are named: sorted by name, line numbers those of each file."""
    lines = [row.where for row in read_rows(name, folder)]
    assert lines == [f"data/{file}.jsonl line {line}" for file in "ab" for line in (1, 2)]


def test_pattern_when_it_has_two_stars_then_folders_in_folders_are_read(folder: Path):
    rows = read_rows("data/**/*.jsonl", folder)
    assert [row.values["text"] for row in rows[::2]] == ["a.jsonl", "b.jsonl", "more/c.jsonl"]
    assert read_rows(str(folder / "data" / "b*.jsonl"), Path("/"))[0].where == f"{folder}/data/b.jsonl line 1"


def test_pattern_when_a_file_has_that_very_name_then_it_is_the_file(write: Write, tmp_path: Path):
    write("part[1].jsonl", [{"text": "itself"}])
    write("part1.jsonl", [{"text": "matching"}])
    assert [row.values["text"] for row in read_rows("part[1].jsonl", tmp_path)] == ["itself"]


def test_pattern_when_the_base_directory_has_marks_then_they_are_no_pattern(tmp_path: Path):
    base = tmp_path / "run[1]"
    base.mkdir()
    (base / "a.jsonl").write_text('{"text": "a"}\n')
    assert read_rows("*.jsonl", base)[0].where == "a.jsonl line 1"


def test_folder_or_pattern_when_there_is_nothing_to_read_then_reports_it(folder: Path):
    (folder / "empty").mkdir()
    (folder / "deep" / "er").mkdir(parents=True)
    assert error_of("empty", folder) == f"empty: is a directory without data files ({ACCEPTED})."
    assert error_of("deep", folder).endswith("Files of the folders in it: deep/**/*.jsonl.")
    assert error_of("data/*.csv", folder) == f"data/*.csv: no file matches. Patterns are relative to {folder}."
    assert error_of("data/*", folder).startswith("data/README.md: has the suffix '.md'; accepted are")


def test_folder_when_one_file_is_empty_then_the_others_are_read(write: Write, folder: Path):
    """Programs that write in parts leave empty ones; a source with no row at all is an error."""
    write("data/a.jsonl", "")
    assert [row.where for row in read_rows("data", folder)] == ["data/b.jsonl line 1", "data/b.jsonl line 2"]
    write("data/b.jsonl", "")
    assert error_of("data", folder) == "data: has no rows."


def test_source_when_only_some_rows_are_wanted_then_they_are_the_first(folder: Path):
    rows = find_source("data", folder, max_rows=3).rows()
    assert [row.where for row in rows] == ["data/a.jsonl line 1", "data/a.jsonl line 2", "data/b.jsonl line 1"]


def save(folder: Path, files: dict[str, list[str]], named: list[str]) -> None:
    """Writes a folder as `save_to_disk` of datasets does."""
    folder.mkdir(parents=True)
    for name, texts in files.items():
        table = pa.table({"text": texts, "meta": [{"marks": [1, 2]}] * len(texts)})
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in named]}))
    (folder / "dataset_info.json").write_text("{}")


def test_saved_data_set_when_read_then_rows_follow_in_the_order_of_its_state(tmp_path: Path):
    """What the folder declares goes before the names of its files, and files it does not name are no part of it."""
    parts = {"part-1.arrow": ["a"], "part-0.arrow": ["b", "c", "d"], "cache-7.arrow": ["no"]}
    save(tmp_path / "saved", parts, ["part-1.arrow", "part-0.arrow"])
    rows = read_rows("saved", tmp_path)
    assert [row.values["text"] for row in rows] == ["a", "b", "c", "d"]
    assert rows[3].where == "saved/part-0.arrow row 3"
    assert rows[3].values["meta"] == {"marks": [1, 2]}


def test_saved_data_set_when_it_has_splits_then_they_are_named(tmp_path: Path):
    for split in ("test", "train"):
        save(tmp_path / "saved" / split, {"data.arrow": [split]}, ["data.arrow"])
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    found = "saved: holds the splits test, train; name one of them, such as saved/train."
    assert error_of("saved", tmp_path) == found
    assert read_rows("saved/test", tmp_path)[0].values["text"] == "test"


def test_saved_data_set_when_it_is_damaged_then_reports_what_is_wrong(tmp_path: Path):
    save(tmp_path / "gone", {"a.arrow": ["a"]}, ["a.arrow", "b.arrow"])
    assert error_of("gone", tmp_path) == "gone: b.arrow, which its state.json names, is not there."
    save(tmp_path / "out", {"a.arrow": ["a"]}, ["../gone/a.arrow"])
    assert "is not there" in error_of("out", tmp_path)
    (tmp_path / "gone" / "state.json").write_text("{")
    assert error_of("gone", tmp_path) == "gone: its state.json does not list its files."
    (tmp_path / "gone" / "state.json").write_text('{"_data_files": []}')
    assert error_of("gone", tmp_path) == "gone: has no rows."
    (tmp_path / "broken.arrow").write_bytes(b"\xff\xff\xff\xff\x10\0\0\0nothing")
    assert error_of("broken.arrow", tmp_path).startswith("broken.arrow: is not an arrow file that can be read (")
