"""What runs in a process with limits returns, raises or passes a limit, and never takes anybody with it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from weft.data.json_rows import parse_json
from weft.errors import DataError
from weft.serve.limited_process import FileLimits, LimitedProcess


@pytest.fixture
def process() -> Iterator[LimitedProcess]:
    """A process with so much time that only one that hangs would pass it."""
    made = LimitedProcess(FileLimits(seconds=600.0, memory_bytes=2**28))
    yield made
    made.close()


def test_call_when_all_is_well_then_returns_and_raises_as_if_here(process: LimitedProcess):
    """One process for all calls, and an error keeps its place."""
    assert process.call(os.getpid) == process.call(os.getpid) != os.getpid()
    with pytest.raises(DataError) as caught:
        process.call(parse_json, "{", "rows.jsonl line 3")
    assert caught.value.where == "rows.jsonl line 3"
    with pytest.raises(ZeroDivisionError):
        process.call(divmod, 1, 0)


def test_call_when_it_needs_too_much_memory_then_reports_it_and_the_next_is_served(process: LimitedProcess):
    with pytest.raises(DataError, match=r"needs more than the 0\.25 GiB of memory that a file may take"):
        process.call(bytearray, 2**30)
    assert process.call(len, "abc") == 3


def test_call_when_its_process_dies_then_reports_it_and_the_next_has_another(process: LimitedProcess):
    before = process.call(os.getpid)
    with pytest.raises(DataError, match="its process ended"):
        process.call(os.kill, before, signal.SIGKILL)
    assert process.call(os.getpid) != before


def test_call_when_it_takes_too_long_then_its_process_is_ended():
    process = LimitedProcess(FileLimits(seconds=0.001))
    with pytest.raises(DataError, match=r"took more than the 0\.001 s that a file may take to be read"):
        process.call(time.sleep, 3600)
    assert process._program is None
