"""A process that a starter forks is like one that was started alone, and is there whatever becomes of the starter."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from weft.starter import starter as shared
from weft.starter.child_process import ChildProcess, ForkedProcess
from weft.starter.order import ProcessOrder
from weft.starter.starter import Starter, start_process

Start = Callable[..., ChildProcess]


def until(is_so: Callable[[], bool], longest_s: float = 60.0) -> None:
    end_s = time.monotonic() + longest_s
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def told(place: Path) -> dict[str, Any]:
    """What the program that writes there tells of itself."""
    until(place.exists)
    return json.loads(place.read_text())


@pytest.fixture
def starter() -> Iterator[Starter]:
    """One that imports nothing, so it is there at once."""
    found = Starter(PLAIN, modules=())
    yield found
    found.close()


@pytest.fixture
def start(starter: Starter, tmp_path: Path) -> Iterator[Start]:
    """Starts the program that does as it is asked, and tells of itself in a file of that name."""
    started: list[ChildProcess] = []

    def begin(what: str, *files: int, by: Starter = starter) -> ChildProcess:
        order = ProcessOrder(
            "started_program", (what, str(tmp_path / what)), {**PLAIN, "WEFT_RANK_KEY": "secret"}, "weft-started"
        )
        with (tmp_path / "log").open("ab") as out:
            started.append(by.start(order, out.fileno(), files))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()


PLAIN = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def is_forked(process: ChildProcess) -> bool:
    return isinstance(process.wait_begun(), ForkedProcess)


def test_process_when_forked_then_finds_what_one_finds_that_was_started_alone(start, starter, tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    forked = start("done")
    assert is_forked(forked) and forked.wait(60) == 0
    first = told(tmp_path / "done")
    (tmp_path / "done").unlink()
    starter.close()
    alone = start("done")
    assert not is_forked(alone) and alone.wait(60) == 0
    second = told(tmp_path / "done")
    for found, process in ((first, forked), (second, alone)):
        assert found.pop("pid") == found.pop("session") == process.pid
    assert first.pop("name") == "weft-started" != second.pop("name")
    assert first.pop("parent") == starter._process.pid and second.pop("parent") == os.getpid()
    assert first == second
    assert (tmp_path / "log").read_text() == "said\n" * 2
    assert first["folder"] == str(tmp_path / "folder") and first["variables"]["WEFT_RANK_KEY"] == "secret"


def test_process_when_it_ends_then_its_code_or_signal_is_known_and_nothing_is_left_of_it(start, tmp_path):
    failing, breaking, staying = (start(what) for what in ("fail", "break", "stay"))
    assert (failing.wait(60), breaking.wait(60)) == (3, 1)
    assert "ValueError: broken" in (tmp_path / "log").read_text()
    told(tmp_path / "stay")
    assert staying.poll() is staying.returncode is None
    with pytest.raises(subprocess.TimeoutExpired):
        staying.wait(0.01)
    os.kill(staying.pid, signal.SIGTERM)
    assert staying.wait(60) == staying.poll() == staying.returncode == -signal.SIGTERM
    assert all(is_forked(process) for process in (failing, breaking, staying))
    assert not any(Path(f"/proc/{process.pid}").exists() for process in (failing, breaking, staying))


def test_process_when_given_a_file_then_has_it_and_nobody_else_holds_it(start):
    """Whoever reads from it sees its end when the process is gone."""
    mine, its = os.pipe()
    staying, writing = start("stay"), start("write", its)
    os.close(its)
    writing.wait_begun(), staying.wait_begun()
    with os.fdopen(mine, "rb") as file:
        assert file.read() == b"written"
    assert staying.poll() is None


def test_starter_when_it_is_killed_then_its_processes_live_and_their_end_is_seen(start, starter, tmp_path):
    before = start("stay")
    told(tmp_path / "stay")
    starter._process.kill()
    starter._process.wait()
    assert before.poll() is None
    after = start("fail")
    assert after.wait(60) == 3 and not is_forked(after)
    os.killpg(before.pid, signal.SIGTERM)
    assert before.wait(60) == -signal.SIGKILL, "nobody knows, so it counts as killed"


def test_starter_when_it_is_killed_while_it_was_asked_then_the_process_is_started_alone(start, starter):
    os.kill(starter._process.pid, signal.SIGSTOP)
    process = start("fail")
    starter._process.kill()
    assert process.wait(60) == 3 and not is_forked(process)


def test_process_when_killed_before_it_runs_then_it_never_does(start, starter, tmp_path):
    os.kill(starter._process.pid, signal.SIGSTOP)
    process = start("stay")
    process.kill()
    assert process.wait() == process.returncode == -signal.SIGKILL and process.pid == 0
    os.kill(starter._process.pid, signal.SIGCONT)
    assert start("done").wait(60) == 0
    assert (tmp_path / "done").exists() and not (tmp_path / "stay").exists()


@pytest.mark.parametrize("module", ["threaded_module", "no_such_module"])
def test_starter_when_it_cannot_fork_then_processes_are_started_alone(start, module):
    unfit = Starter(PLAIN, modules=(module,))
    process = start("fail", by=unfit)
    assert process.wait(60) == 3 and not is_forked(process)
    unfit.close()


def test_starter_when_nobody_asks_any_more_then_it_ends_with_its_last_process(start, starter):
    process = start("stay")
    process.wait_begun()
    starter.retire()
    assert not starter.has_ended()
    process.kill()
    assert process.wait() == -signal.SIGKILL
    until(starter.has_ended)


def test_starter_when_another_environment_is_wanted_then_it_fits_unless_libraries_have_read_it():
    own = {"PATH": "/bin", "OMP_NUM_THREADS": "2"}
    starter = Starter(own, modules=())
    assert starter.fits({**own, "CUDA_VISIBLE_DEVICES": "3", "WEFT_RANK_KEY": "key"})
    assert not starter.fits({**own, "OMP_NUM_THREADS": "1"}) and not starter.fits({"PATH": "/bin"})
    starter.close()
    assert not starter.fits(own)


def test_processes_when_they_want_two_environments_then_two_starters_import_and_each_knows_its_own(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(shared, "PRELOADED", ())
    monkeypatch.setattr(shared, "_STARTERS", [])
    processes = []
    with (tmp_path / "log").open("wb") as out:
        for what, threads in (("stay", "1"), ("done", "1"), ("fail", "2")):
            variables = {**PLAIN, "OMP_NUM_THREADS": threads}
            order = ProcessOrder("started_program", (what, str(tmp_path / what)), variables, "weft-started")
            processes.append(start_process(order, out.fileno()))
    staying, *others = processes
    assert [process.wait(60) for process in others] == [0, 3]
    parents = [told(tmp_path / what)["parent"] for what in ("stay", "done", "fail")]
    assert parents[0] == parents[1] != parents[2]
    assert [starter._process.pid for starter in shared._STARTERS] == parents[1:]
    os.kill(staying.pid, signal.SIGTERM)
    assert staying.wait(60) == -signal.SIGTERM
    until(shared._STARTERS[0].has_ended)
    shared._STARTERS[1].close()
