"""Data that another process prepares while this one loads is what this one would have made, errors and all."""

from __future__ import annotations

import datetime
import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from weft.data.load import load_job_data
from weft.data.prepared import prepare as prepare_module
from weft.data.prepared.prepare import Standing, shown_by
from weft.engine.execute import data_ahead
from weft.engine.execute.data_ahead import DataAhead, prepare_ahead
from weft.errors import DataError
from weft.model.source import load_tokenizer
from weft.spec import JobSpec

CLOCK = datetime.datetime(2026, 1, 2)
ROWS = [{"prompt": f"item {i}", "completion": f"answer {i}"} for i in range(30)]
JOBS = tuple(JobSpec(name, (file,), max_steps=1) for name, file in (("good", "good.jsonl"), ("bad", "bad.jsonl")))


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own, and files of which the second has a mistake."""
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    for name, rows in (("good", ROWS), ("bad", [*ROWS, {"prompt": "ask"}])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DataAhead]:
    monkeypatch.setattr(data_ahead, "WORTH_BYTES", 1)
    started = prepare_ahead("tiny", JOBS, tmp_path, CLOCK)
    assert started is not None
    with closing(started):
        yield started


def load(job: JobSpec, folder: Path) -> Any:
    return load_job_data(job, load_tokenizer("tiny"), folder, clock=CLOCK).train


def test_data_when_it_was_prepared_ahead_then_it_is_found_and_is_the_same(
    ahead: DataAhead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Bits and summary; an error in another job's data has the same message as when it is loaded here."""
    ahead.wait("good")
    with pytest.raises(DataError) as raised:
        ahead.wait("bad")
    with pytest.raises(DataError) as found:
        load(JOBS[1], tmp_path)
    assert str(raised.value) == str(found.value) == "bad.jsonl line 31: completion is missing."
    assert raised.value.setting == found.value.setting == "train_data"

    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "prepare", lambda *_: pytest.fail("is prepared again"))
        kept = load(JOBS[0], tmp_path)
    monkeypatch.setenv("WEFT_CACHE", "off")
    made = load(JOBS[0], tmp_path)
    assert (kept.fingerprint, kept.summary) == (made.fingerprint, made.summary)


@pytest.mark.faults
def test_data_when_the_process_that_prepares_it_dies_then_nothing_waits(ahead: DataAhead, tmp_path: Path):
    """It is then prepared here, as ever."""
    os.kill(ahead._program.pid, signal.SIGKILL)
    ahead.wait("good")
    ahead.wait_for_all()
    assert load(JOBS[0], tmp_path).summary.num_rows == 30


@pytest.mark.faults
def test_process_when_its_parent_is_killed_then_it_ends(tmp_path: Path):
    """A killed run leaves no process that prepares data for hours."""
    # Gigabytes of empty lines, to be read for minutes.
    (tmp_path / "endless.jsonl.gz").write_bytes(gzip.compress(b"\n" * 2**20) * 8000)
    code = (
        "import datetime, pathlib\n"
        "from weft.engine.execute.data_ahead import DataAhead, Request\n"
        "from weft.spec import JobSpec\n"
        "jobs = (JobSpec('endless', ('endless.jsonl.gz',), max_steps=1),)\n"
        f"ahead = DataAhead(Request('tiny', jobs, pathlib.Path({str(tmp_path)!r}), datetime.datetime.now(), False))\n"
        "print(ahead._program.pid, flush=True)\n"
        "ahead.wait_for_all()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
        try:
            # The process has this pipe too: it ends when both are gone.
            parent.communicate(timeout=30)
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_progress_when_a_command_shows_it_then_it_comes_from_the_other_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of data that is prepared in a moment, that it is over; both jobs have some."""
    monkeypatch.setattr(data_ahead, "WORTH_BYTES", 1)
    seen: list[Standing | None] = []
    with shown_by(seen.append):
        started = prepare_ahead("tiny", JOBS, tmp_path, CLOCK)
    assert started is not None
    with closing(started):
        started.wait_for_all()
    assert seen == [None, None]


def test_data_when_it_is_little_or_not_kept_or_not_there_then_no_process_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Most runs of beginners: a process would take longer to start than their data to be prepared."""
    monkeypatch.setattr(data_ahead, "DataAhead", lambda _: pytest.fail("is started"))
    assert prepare_ahead("tiny", JOBS, tmp_path, CLOCK) is None
    monkeypatch.setattr(data_ahead, "WORTH_BYTES", 1)
    assert prepare_ahead("tiny", (JobSpec("lost", ("lost.jsonl",), max_steps=1),), tmp_path, CLOCK) is None
    monkeypatch.setenv("WEFT_CACHE", "off")
    assert prepare_ahead("tiny", JOBS, tmp_path, CLOCK) is None


def test_tokenizer_when_torch_is_kept_out_then_it_is_the_same():
    """Its identity is part of the key under which prepared data is found again."""
    code = (
        "import sys\n"
        "from weft.data.prepared.workers import do_without_torch\n"
        "do_without_torch()\n"
        "from weft.model.source import load_tokenizer\n"
        "from weft.data.prepared.key import tokenizer_identity\n"
        "print(tokenizer_identity(load_tokenizer('tiny')), sys.modules['torch'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [data_ahead.tokenizer_identity(load_tokenizer("tiny")), "None"]
    assert done.stderr == ""
