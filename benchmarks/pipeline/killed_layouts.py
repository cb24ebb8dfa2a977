"""`kill -9` at random moments of whole `weft train --layout` commands, from their first import to their last file.

layout_kills_differ   adapters of all these runs whose bytes are not those of the same layout without a kill.
layout_kills_hung     runs that did not end by themselves, or ended with an error.
layout_kills_left     processes of stages that outlived their run.
layout_kill_seen_s    the longest time from the death of a stage until its coordinator reports it.
num_layout_kills      runs in which something was killed: a stage, and once for every layout the coordinator, which is
                      then resumed. Each run of a layout is disturbed in another part of its time.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.processes import TrainCommand, child_processes, is_named
from benchmarks.replicas.trained import SmallJobs, differing_adapters
from weft.errors import WeftError

LAYOUTS = (
    "stages:2",
    "stages:1+stages:2",
    "stages:2+stages:2",
    "spread:2",
    "shards:2",
    "shards:2+stages:1",
    "shards:2,stages:2",
    "tensor:2",
)
NUM_EACH = 3
"""Runs of every layout in which something is killed."""
SETTINGS = {"eval_data": 8, "eval_steps": 4}
JOBS = SmallJobs(num_jobs=3, num_steps=8, save_steps=2, num_free=1, settings=SETTINGS)
STAGE = ("weft-stage", "stage_process")
"""What every stage is called, or its command is: the one that was forked, and the one that was not."""
SEEN = "was ended by signal 9"
"""The coordinator's message about a stage that was killed."""
LOOK_S = 0.1
LONGEST_S = 120.0
"""A run that takes so much longer than five undisturbed ones is taken for hung."""
END_S = 10.0
"""Within so many seconds of the end of a run its stages must be gone."""


@dataclass
class LayoutKills:
    """What all runs together showed."""

    num_kills: int = 0
    num_differing: int = 0
    num_hung: int = 0
    num_left: int = 0
    seen_s: list[float] = field(default_factory=list)

    @property
    def figures(self) -> dict[str, float]:
        """Keys as in `python -m benchmarks pipeline --json`."""
        return {
            "layout_kills_differ": float(self.num_differing),
            "layout_kills_hung": float(self.num_hung),
            "layout_kills_left": float(self.num_left),
            "layout_kill_seen_s": max(self.seen_s, default=0.0),
            "num_layout_kills": float(self.num_kills),
        }


def measure_layout_kills(layouts: Sequence[str] = LAYOUTS, num_each: int = NUM_EACH, seed: int = 0) -> dict[str, float]:
    """Keys as in `python -m benchmarks pipeline --json`."""
    found, drawn = LayoutKills(), random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="weft-killed-") as name:
        folder = Path(name)
        JOBS.write(folder)
        JOBS.write_file(folder / "jobs.yaml")
        for number, layout in enumerate(layouts):
            runs = _Runs(TrainCommand(folder, "jobs.yaml"), layout, drawn, found)
            runs.undisturbed()
            for part in range(num_each):
                # Another part of the time for each run, so that no kind of moment is left out by chance.
                outs = (f"{layout}-{part}-{turn}" for turn in itertools.count())
                is_coordinator = part == number % num_each
                while not runs.kill(next(outs), (part + drawn.random()) / num_each, is_coordinator=is_coordinator):
                    # A moment may come too late for a run that was faster than those before.
                    pass
    return found.figures


@dataclass
class _Runs:
    """Runs of one layout, each into a directory of its own."""

    command: TrainCommand
    layout: str
    drawn: random.Random
    found: LayoutKills
    whole_s: float = 0.0
    """Seconds of the last run to which nothing happened."""

    def undisturbed(self) -> None:
        """A run to which nothing happens; WeftError if it fails."""
        begun_s = time.monotonic()
        if self.command.start(self.layout, "--layout", self.layout).wait() != 0:
            words = self.command.log(self.layout).read_text().splitlines()
            raise WeftError(f"a run without a kill failed: {words[-1] if words else ''}", where=self.layout)
        self.whole_s = time.monotonic() - begun_s

    def kill(self, out: str, moment: float, *, is_coordinator: bool) -> bool:
        """One run in which something is killed after a share of its time, and what becomes of it; False if it ended."""
        begun_s, stages = time.monotonic(), set[int]()
        run = self.command.start(out, "--layout", self.layout)
        with suppress(subprocess.TimeoutExpired):
            run.wait(moment * self.whole_s)
        until_s = time.monotonic() + 5 * self.whole_s + LONGEST_S
        kill = self._kill_coordinator if is_coordinator else self._kill_stage
        killed_s = kill(run, stages)
        if killed_s is None:
            self.whole_s = time.monotonic() - begun_s
            return False
        self.found.num_kills += 1
        if is_coordinator:
            self.found.num_left += _living(stages)
            run, stages = self.command.go_on(out, "--layout", self.layout), set()
        if not self._ends(run, out, stages, until_s, None if is_coordinator else killed_s):
            self.found.num_hung += 1
        self.found.num_left += _living(stages)
        differing = differing_adapters(self.command.folder / self.layout, self.command.folder / out)
        self.found.num_differing += len(differing)
        return True

    def _kill_coordinator(self, run: subprocess.Popen[bytes], stages: set[int]) -> float | None:
        if run.poll() is not None:
            return None
        stages.update(child_processes(run.pid, STAGE))
        run.kill()
        run.wait()
        return time.monotonic()

    def _kill_stage(self, run: subprocess.Popen[bytes], stages: set[int]) -> float | None:
        """Kills one as soon as there are any; None if the run ends before that."""
        while run.poll() is None:
            living = child_processes(run.pid, STAGE)
            if living:
                stages.update(living)
                with suppress(ProcessLookupError):
                    os.kill(self.drawn.choice(living), signal.SIGKILL)
                return time.monotonic()
            time.sleep(LOOK_S)
        return None

    def _ends(
        self, run: subprocess.Popen[bytes], out: str, stages: set[int], until_s: float, killed_s: float | None
    ) -> bool:
        """Follows a run to its end, and whether that came by itself and was a good one."""
        is_over = False
        while not is_over:
            is_over = run.poll() is not None
            if killed_s is not None and SEEN in self.command.log(out).read_text(errors="replace"):
                self.found.seen_s.append(time.monotonic() - killed_s)
                killed_s = None
            stages.update(child_processes(run.pid, STAGE))
            if time.monotonic() > until_s:
                run.kill()
                run.wait()
                return False
            time.sleep(LOOK_S)
        return run.returncode == 0


def _living(pids: set[int]) -> int:
    """How many of these processes have not ended in time; they are ended then."""
    until_s = time.monotonic() + END_S
    while pids and time.monotonic() < until_s:
        pids = {pid for pid in pids if is_named(pid, STAGE)}
        time.sleep(LOOK_S)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(pids)
