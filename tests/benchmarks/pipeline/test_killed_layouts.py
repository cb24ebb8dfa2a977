"""`python -m benchmarks pipeline --regime layout_kills_differ`: what is counted of runs in which something dies."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import dataclass

import pytest

from benchmarks.pipeline import killed_layouts
from benchmarks.pipeline.killed_layouts import STAGE, LayoutKills, _Runs
from benchmarks.processes import FORK_SERVER, TrainCommand, is_named
from benchmarks.replicas.trained import ADAPTER

RUN = """
import pathlib, subprocess, sys, time
stage = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "STAGE"])
if stage.wait() == -9:
    print("stage 1: was ended by signal 9, so all stages were ended.", flush=True)
place = pathlib.Path(sys.argv[1]) / "job" / "ADAPTER"
place.parent.mkdir(parents=True, exist_ok=True)
place.write_bytes(sys.argv[2].encode())
time.sleep(float(sys.argv[3]))
""".replace("STAGE", STAGE[1]).replace("ADAPTER", ADAPTER)


@dataclass(frozen=True)
class Scripted(TrainCommand):
    """A run that waits for the death of its one stage, writes an adapter and takes some more seconds."""

    adapter: str = "bytes"
    last_s: float = 0.0

    def start(self, out: str, *options: str) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-c", RUN, out, self.adapter, str(self.last_s)]
        with self.log(out).open("ab") as log:
            return subprocess.Popen(words, cwd=self.folder, stdout=log)


@pytest.mark.parametrize(
    ("command", "figures"),
    [
        ({}, {"layout_kills_differ": 0, "layout_kills_hung": 0, "layout_kills_left": 0}),
        ({"adapter": "others"}, {"layout_kills_differ": 1, "layout_kills_hung": 0}),
        ({"last_s": 60}, {"layout_kills_hung": 1}),
    ],
    ids=["good", "differs", "hangs"],
)
def test_kill_when_a_stage_dies_then_what_became_of_its_run_is_counted(tmp_path, monkeypatch, command, figures):
    monkeypatch.setattr(killed_layouts, "LONGEST_S", 2.0)
    expected = tmp_path / "stages:2" / "job" / ADAPTER
    expected.parent.mkdir(parents=True)
    expected.write_bytes(b"bytes")
    found = LayoutKills()
    runs = _Runs(Scripted(tmp_path, **command), "stages:2", random.Random(0), found)
    assert runs.kill("killed", 0.01, is_coordinator=False)
    assert found.num_kills == 1 and len(found.seen_s) == 1
    assert figures.items() <= found.figures.items()


def test_living_when_a_stage_outlives_its_run_then_it_is_counted_and_ended(monkeypatch):
    monkeypatch.setattr(killed_layouts, "END_S", 0.1)
    words = [sys.executable, "-c", "import time; time.sleep(60)", STAGE[1]]
    ended, living = subprocess.Popen([sys.executable, "-c", "", STAGE[1]]), subprocess.Popen(words)
    ended.wait()
    assert killed_layouts._living({ended.pid, living.pid}) == 1
    assert living.wait() == -9


def test_kill_when_the_run_has_ended_before_then_it_counts_for_nothing_but_its_time(tmp_path):
    found = LayoutKills()
    command = Scripted(tmp_path)
    runs = _Runs(command, "stages:2", random.Random(0), found, whole_s=60.0)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    object.__setattr__(command, "start", lambda *_: ended)
    for is_coordinator in (False, True):
        assert not runs.kill("killed", 0.5, is_coordinator=is_coordinator)
    assert found == LayoutKills() and runs.whole_s < 60.0


def test_living_when_only_the_fork_server_is_left_then_that_is_no_stage():
    """Its command names what it imports for the stages."""
    words = [sys.executable, "-c", "import time; time.sleep(60)", f"{FORK_SERVER} {STAGE[1]}"]
    with subprocess.Popen(words) as server:
        try:
            assert not is_named(server.pid, STAGE)
        finally:
            server.kill()
