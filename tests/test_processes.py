"""Children of the fork server are like programs that were started alone, whatever becomes of the server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe, forkserver
from pathlib import Path
from typing import Any

import pytest

from weft import processes
from weft.processes import ChildProcess

Start = Callable[..., ChildProcess]


def until(is_so: Callable[[], bool], longest_s: float = 120.0) -> None:
    end_s = time.monotonic() + longest_s
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def report_of(path: Path) -> dict[str, Any]:
    """What the program that writes there reports of itself."""
    until(path.exists)
    return json.loads(path.read_text())


@pytest.fixture(scope="module", autouse=True)
def _bare_server() -> Iterator[None]:
    """A server that imports nothing, so it is there at once."""
    context = processes._context()
    context.set_forkserver_preload([])
    _kill_server()
    yield
    context.set_forkserver_preload([*processes.PRELOADED])
    _kill_server()


def _kill_server() -> None:
    if (pid := forkserver._forkserver._forkserver_pid) is not None:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the program that does what its argument requests, and reports on itself in a file of that name."""
    started: list[ChildProcess] = []

    def begin(what: str, *connections: Any) -> ChildProcess:
        variables = {"PATH": os.environ["PATH"], "WEFT_RANK_KEY": "secret"}
        given = ("started_program", (what, str(tmp_path / what)), connections)
        started.append(ChildProcess(*given, variables=variables, name="weft-started", log=tmp_path / "log"))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()


def test_process_when_started_then_finds_what_a_program_of_its_own_finds(start, tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    process = start("done")
    assert process.wait(120) == 0
    found = report_of(tmp_path / "done")
    assert found["pid"] == found["session"] == process.pid
    assert found["parent"] != os.getpid(), "a fork of the server"
    assert found["variables"] == {"PATH": os.environ["PATH"], "WEFT_RANK_KEY": "secret"}
    assert found["folder"] == str(tmp_path / "folder")
    assert (found["name"], found["input"], found["threads"]) == ("weft-started", os.devnull, 1)
    assert (tmp_path / "log").read_text() == "said\n"


def test_process_when_it_ends_then_its_code_or_signal_is_known_and_nothing_is_left_of_it(start, tmp_path):
    failing, breaking, staying = (start(what) for what in ("fail", "break", "stay"))
    assert (failing.wait(120), breaking.wait(60)) == (3, 1)
    assert "ValueError: broken" in (tmp_path / "log").read_text()
    report_of(tmp_path / "stay")
    assert staying.poll() is staying.returncode is None
    with pytest.raises(subprocess.TimeoutExpired):
        staying.wait(0.01)
    os.kill(staying.pid, signal.SIGTERM)
    assert staying.wait(60) == staying.poll() == staying.returncode == -signal.SIGTERM
    assert not any(Path(f"/proc/{process.pid}").exists() for process in (failing, breaking, staying))


def test_process_when_given_a_connection_then_has_it_and_no_other_process_holds_it(start):
    """Its end is seen at the other end of the connection."""
    (mine, its), (other, others) = Pipe(), Pipe()
    staying, writing = start("stay", others), start("write", its)
    writing.wait_begun(), staying.wait_begun()
    assert mine.recv() == "written"
    with pytest.raises(EOFError):
        mine.recv()
    assert staying.poll() is None and not other.poll()


def test_server_when_it_is_killed_then_its_processes_live_and_another_starts_the_next(start, tmp_path):
    before = start("stay")
    server = report_of(tmp_path / "stay")["parent"]
    _kill_server()
    assert before.poll() is None
    assert start("fail").wait(120) == 3
    assert report_of(tmp_path / "fail")["parent"] != server
    assert before.poll() is None
    os.killpg(before.pid, signal.SIGTERM)
    assert before.wait(60) == -signal.SIGKILL, "no process knows, so it counts as killed"


def test_process_when_killed_before_it_runs_then_no_one_waits_for_its_start(start, tmp_path):
    first = start("done")
    first.wait(120)
    server = report_of(tmp_path / "done")["parent"]
    os.kill(server, signal.SIGSTOP)
    process = start("stay")
    process.kill()
    assert process.wait() == -signal.SIGKILL
    os.kill(server, signal.SIGCONT)
    process.wait_begun()
    until(lambda: process.poll() == -signal.SIGKILL)
    until(lambda: not Path(f"/proc/{process.pid}").exists())


def test_program_when_it_ends_then_so_do_its_processes_and_their_server(tmp_path):
    code = (
        "import os, sys\n"
        "from multiprocessing import Pipe\n"
        "from pathlib import Path\n"
        "from weft import processes\n"
        "from weft.processes import ChildProcess\n"
        "processes._context().set_forkserver_preload([])\n"
        "mine, its = Pipe()\n"
        "given = {'variables': os.environ, 'name': 'weft-started', 'log': Path(sys.argv[1]) / 'log'}\n"
        "process = ChildProcess('started_program', ('stay', f'{sys.argv[1]}/stay'), [its], **given)\n"
        "print(process.pid, processes.forkserver._forkserver._forkserver_pid, flush=True)\n"
    )
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths})
    assert done.returncode == 0 and done.stderr == ""
    pid, server = map(int, done.stdout.split())
    until(lambda: not Path(f"/proc/{pid}").exists() and not Path(f"/proc/{server}").exists())
