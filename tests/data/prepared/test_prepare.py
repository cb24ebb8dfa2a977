"""Sources of several files are prepared as one data set."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from thread_program import ThreadProgram
from tiny_tokenizer import make_tokenizer

from weft.data.dataset import Dataset
from weft.data.load import load_dataset
from weft.data.prepared import prepare, workers
from weft.errors import DataError

Write = Callable[..., str]
TOKENIZER = make_tokenizer()


@pytest.fixture(autouse=True)
def _kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is prepared is kept, so that other data must have another key."""
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))


def rows(*numbers: int) -> list[dict[str, Any]]:
    return [{"prompt": "ask", "completion": f"answer {i}"} for i in numbers]


def load(sources: list[str], base_dir: Path) -> Dataset:
    return load_dataset(sources, TOKENIZER, max_length=64, base_dir=base_dir)


@pytest.mark.parametrize("processes", [1, 2])
def test_folder_when_prepared_then_is_what_its_files_are_one_by_one(
    processes: int, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Files smaller and larger than a chunk, by any number of processes; a file more is other data."""
    monkeypatch.setattr(workers, "ROWS_PER_CHUNK", 3)
    monkeypatch.setattr(workers, "ChildProgram", ThreadProgram)
    monkeypatch.setattr(prepare, "num_processes", lambda *_: processes)
    (tmp_path / "data").mkdir()
    numbers: dict[str, list[int]] = {"a": [1], "b": [*range(7)], "c": [9, 8]}
    names = [write(f"data/{name}.jsonl", rows(*some)) for name, some in numbers.items()]
    folder = load(["data"], tmp_path)
    assert folder.fingerprint == load(names, tmp_path).fingerprint
    assert folder.summary.sources == ("data",)
    write("data/d.jsonl", rows(10))
    assert len(load(["data"], tmp_path).samples) == len(folder.samples) + 1


def test_folder_when_a_file_has_rows_of_another_kind_then_its_line_is_named(write: Write, tmp_path: Path):
    """Files that are named one by one may differ; those of a folder that do are a mistake."""
    (tmp_path / "data").mkdir()
    names = [write("data/a.jsonl", rows(1)), write("data/b.jsonl", [{"text": "plain"}])]
    with pytest.raises(DataError, match=r"^data/b\.jsonl line 1: is in the text format, but the rows before"):
        load(["data"], tmp_path)
    assert load(names, tmp_path).summary.format == "completion, text"
