"""Children are kept running, stopped once, and never outlive the supervisor."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from weft.serve import supervise
from weft.serve.supervise import DISMISSED, WORKER_NICE, Child, Supervisor

_REAL_START = supervise._START
PATIENCE_S = 300.0
"""How long a test waits for what must happen; it matters only if it does not."""
CHILD = """
import ctypes, json, pathlib, signal, sys, time
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
*verb, kind, place = json.loads(sys.stdin.buffer.readline())
notes = pathlib.Path(place)
def note(text):
    with notes.open("a") as file:
        file.write(f"{text} {time.monotonic()}\\n")
def on_stop(number, frame):
    note("signalled")
signal.signal(signal.SIGTERM, on_stop)
note("started")
if kind == "tells":
    import os
    note(os.environ.get("OMP_NUM_THREADS"))
    note(int(sys.argv[2]))
    note(int(os.getpgid(0) == os.getpid()))
    note(int(os.getsid(0) == os.getsid(os.getppid())))
    kind = "slow"
if kind == "dies":
    sys.exit(3)
if kind == "dismissed":
    sys.exit(76)
while "signalled" not in notes.read_text():
    time.sleep(0.01)
while kind == "deaf":
    time.sleep(1)
until = time.monotonic() + 1.0
while time.monotonic() < until:
    time.sleep(0.05)
note("left")
"""
"""Notes what happens to it. `dies` does so at once, `slow` needs a second to leave, `deaf` does not leave at all."""


@pytest.fixture(autouse=True)
def _children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "_START", CHILD)
    monkeypatch.setattr(supervise, "POLL_S", 0.02)


def notes(path: Path) -> list[str]:
    return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []


def wait(until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not until():
        assert time.monotonic() < deadline, "timed out while waiting"
        time.sleep(0.01)


def test_child_when_stopped_again_and_again_then_gets_one_signal_and_has_its_time(tmp_path: Path):
    supervisor = Supervisor([Child("one", ["slow", str(tmp_path / "one")])])
    supervisor.start()
    wait(lambda: notes(tmp_path / "one") == ["started"])
    supervisor.request_stop()
    supervisor.request_stop()
    assert supervisor.stop(PATIENCE_S)
    assert notes(tmp_path / "one") == ["started", "signalled", "left"]


def test_child_when_it_does_not_leave_then_is_killed_and_the_others_have_left(tmp_path: Path):
    children = [Child(kind, [kind, str(tmp_path / kind)]) for kind in ("deaf", "slow")]
    supervisor = Supervisor(children)
    supervisor.start()
    wait(lambda: all(notes(tmp_path / kind) == ["started"] for kind in ("deaf", "slow")))
    assert not supervisor.stop(3)
    assert notes(tmp_path / "slow") == ["started", "signalled", "left"]
    assert [child.process and child.process.returncode for child in children] == [-9, 0]


def test_child_when_it_dies_then_is_started_again_a_little_later_each_time(tmp_path: Path):
    supervisor = Supervisor([Child(kind, [kind, str(tmp_path / kind)], backoff_s=0.05) for kind in ("dies", "slow")])
    supervisor.start()
    wait(lambda: notes(tmp_path / "dies") == ["started"] * 4)
    supervisor.stop(PATIENCE_S)
    times = [float(line.split()[1]) for line in (tmp_path / "dies").read_text().splitlines()]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert all(gap >= least for gap, least in zip(gaps, (0.1, 0.2, 0.4), strict=False)), gaps
    assert notes(tmp_path / "slow") == ["started", "signalled", "left"], "one that lives is left alone"


def test_child_when_it_was_sent_away_then_is_not_started_again_and_has_ended_well(tmp_path: Path):
    dies, away = (Child(kind, [kind, str(tmp_path / kind)], backoff_s=0.02) for kind in ("dies", "dismissed"))
    supervisor = Supervisor([away, dies])
    supervisor.start()
    wait(lambda: len(notes(tmp_path / "dies")) >= 3)
    wait(lambda: away.is_dismissed)
    assert notes(tmp_path / "dismissed") == ["started"]
    assert away.process is not None and away.process.returncode == DISMISSED
    supervisor.stop(PATIENCE_S)


def test_child_when_it_cannot_be_started_then_tried_again_and_the_others_live_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first, second = (Child(name, ["slow", str(tmp_path / name)], backoff_s=0.02) for name in ("first", "second"))
    supervisor = Supervisor([first])
    supervisor.start()
    wait(lambda: notes(tmp_path / "first") == ["started"])
    python = sys.executable
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    supervisor.children.append(second)
    wait(lambda: second.backoff_s > 0.1)
    monkeypatch.setattr(sys, "executable", python)
    wait(lambda: notes(tmp_path / "second") == ["started"])
    assert supervisor.stop(PATIENCE_S)
    assert notes(tmp_path / "first") == ["started", "signalled", "left"]


@pytest.mark.parametrize(
    ("num_cores", "num_workers", "threads"), [(2, 1, "1"), (16, 1, "15"), (16, 2, "7"), (1, 3, "1")]
)
def test_workers_when_started_then_share_the_cores_and_leave_one_to_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_cores: int, num_workers: int, threads: str
):
    monkeypatch.setattr(supervise, "num_cores", lambda: num_cores)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    verbs = [["worker"]] * num_workers + [["serve"]]
    children = [Child(str(i), [*verb, "tells", str(tmp_path / str(i))]) for i, verb in enumerate(verbs)]
    supervisor = Supervisor(children)
    supervisor.start()
    wait(lambda: all(len(notes(tmp_path / child.name)) == 5 for child in children))
    supervisor.stop(PATIENCE_S)
    noted = [notes(tmp_path / child.name)[1:5] for child in children]
    # Its own group, so that Ctrl-C is not for it; our session, so that `nice` counts between us. It is the worker that
    # stands back: a request comes before a training step.
    assert noted == [[threads, str(WORKER_NICE), "1", "1"]] * num_workers + [["None", "0", "1", "1"]]


def test_worker_when_it_is_started_then_its_process_stands_back_and_ours_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The program of a child lowers its own priority before it imports anything else."""
    program = _REAL_START.partition("sys.argv =")[0] + f"open({str(tmp_path / 'nice')!r}, 'w').write(str(os.nice(0)))\n"
    monkeypatch.setattr(supervise, "_START", program)
    before = os.nice(0)
    supervisor = Supervisor([Child("one", ["worker"])])
    supervisor.start()
    wait(lambda: (tmp_path / "nice").exists() and (tmp_path / "nice").read_text() != "")
    supervisor.stop(PATIENCE_S)
    assert (tmp_path / "nice").read_text() == str(min(19, before + WORKER_NICE))
    assert os.nice(0) == before


def test_worker_when_the_operator_sets_how_many_threads_then_so_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    supervisor = Supervisor([Child("one", ["worker", "tells", str(tmp_path / "one")])])
    supervisor.start()
    wait(lambda: len(notes(tmp_path / "one")) == 5)
    supervisor.stop(PATIENCE_S)
    assert notes(tmp_path / "one")[1] == "5"
