"""Chunks that are converted side by side become what they become one after the other."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from thread_program import ThreadProgram
from tiny_tokenizer import make_tokenizer

from weft.data.load import load_dataset
from weft.data.prepared import prepare
from weft.data.prepared import workers as workers_module
from weft.data.prepared.convert import Converter, DataSettings
from weft.data.prepared.workers import Workers, chunks_of
from weft.data.sources import find_source
from weft.errors import DataError, WeftError

Write = Callable[..., str]
TOKENIZER = make_tokenizer()
SETTINGS = DataSettings(
    objective="auto",
    data_format="auto",
    data_columns={},
    max_length=64,
    long_samples="truncate",
    train_on_inputs=False,
    mask_history=False,
    chat_template=None,
    clock=None,
)
ROWS: list[dict[str, Any]] = [{"prompt": "ask", "completion": f"answer {i}"} for i in range(20)]


@pytest.fixture
def load(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Reads rows in chunks of three, with the given number of processes."""
    monkeypatch.setattr(workers_module, "ROWS_PER_CHUNK", 3)

    def loaded(rows: Any, processes: int, name: str = "train.jsonl", **settings: Any) -> Any:
        monkeypatch.setattr(prepare, "num_processes", lambda *_: processes)
        return load_dataset([write(name, rows)], TOKENIZER, **{"max_length": 64, **settings}, base_dir=tmp_path)

    return loaded


@pytest.fixture
def _in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "ChildProgram", ThreadProgram)


def test_rows_when_converted_side_by_side_then_the_data_is_the_same(load: Callable[..., Any]):
    """Samples, order and account; blank lines and a last chunk that is not full change nothing."""
    text = "\n\n\n\n" + "\n\n".join(json.dumps(row) for row in ROWS) + "\n"
    alone, together = load(text, 1), load(text, 2)
    assert (together.fingerprint, together.summary) == (alone.fingerprint, alone.summary)
    assert together.summary.num_rows == 20


@pytest.mark.usefixtures("_in_threads")
def test_rows_when_a_late_one_needs_another_objective_then_all_are_converted_for_it(load: Callable[..., Any]):
    """One weight in the last chunk makes the whole file weighted."""
    rows = [*ROWS, {**ROWS[0], "weight": 0.5}]
    for processes in (1, 2):
        data = load(rows, processes)
        assert data.objective.name == "weighted"
        assert data.summary.notes == ("objective weighted, by the columns",)
        assert [data.samples[i].weights is None for i in (0, 20)] == [True, False]
    assert "though the columns are those of weighted" in load(rows, 1, objective="supervised").summary.notes[0]


@pytest.mark.usefixtures("_in_threads")
@pytest.mark.parametrize("processes", [1, 2])
def test_rows_when_several_are_wrong_then_the_first_is_named(processes: int, load: Callable[..., Any]):
    """Whichever process is quicker, the earliest line is reported, in the same words."""
    rows = [*ROWS[:10], {"prompt": "ask"}, *ROWS[:4], {"completion": "x"}]
    with pytest.raises(DataError) as caught:
        load(rows, processes)
    assert str(caught.value) == "train.jsonl line 11: completion is missing."
    with pytest.raises(DataError, match=r"^train\.csv line 9: has 1 cell; the header has 2\.$"):
        load("prompt,completion\n" + "a,b\n" * 7 + "c\n", processes, "train.csv")
    with pytest.raises(DataError, match=r"^train\.jsonl: has no rows\.$"):
        load("\n" * 9, processes)


@contextlib.contextmanager
def workers() -> Iterator[Workers]:
    with contextlib.closing(Workers(Converter(TOKENIZER, SETTINGS), 1)) as made:
        yield made


@pytest.mark.faults
def test_worker_when_it_dies_then_that_is_reported(write: Write, tmp_path: Path):
    """A process that is killed ends the preparation with a sentence, not with a wait."""
    source = find_source(write("train.jsonl", ROWS), tmp_path)
    with workers() as made:
        assert len(next(made.convert(chunks_of(source), "supervised", "completion")).samples) == 20
        os.kill(made._workers[0]._program.pid, signal.SIGKILL)
        with pytest.raises(WeftError, match=r"^a process that prepares data ended by signal 9\."):
            next(made.convert(chunks_of(source), "supervised", "completion"))
