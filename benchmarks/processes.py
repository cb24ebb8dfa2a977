"""Processes that are measured: a module by the wall clock, a `weft train` that is disturbed, and its children."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from weft import processes
from weft.errors import WeftError
from weft.store.run_dir import RunDirectory

ONE_THREAD = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
"""The settings in the environment of every process here."""
JOBS_FILE = "jobs.yaml"
TAIL = 2000
"""Characters of a failed command's output that are shown."""
REPOSITORY = Path(__file__).parents[1]


def child_variables() -> dict[str, str]:
    """The environment of a process that runs a module of the benchmarks, wherever it is started."""
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def timed(command: Sequence[str], variables: Mapping[str, str], log: Path) -> float:
    """Seconds that a Python module took as a program of its own; WeftError with its last words if it failed."""
    begun = time.perf_counter()
    with log.open("wb") as out:
        done = subprocess.run(
            [sys.executable, "-m", *command],
            env={**child_variables(), **variables},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    seconds = time.perf_counter() - begun
    if done.returncode != 0:
        raise WeftError(
            f"ended with code {done.returncode}: {log.read_text(errors='replace')[-TAIL:]}", where=command[0]
        )
    return seconds


@dataclass(frozen=True)
class TrainCommand:
    """The same jobs file again and again, each time into a directory of its own."""

    folder: Path
    """Has the jobs file; logs and run directories go there too."""
    jobs_file: str = JOBS_FILE

    def start(self, out: str, *options: str) -> subprocess.Popen[bytes]:
        """A run that has been started; what it prints is added to its log at once."""
        words = [sys.executable, "-m", "weft", "train", self.jobs_file, "--out", out, *options]
        variables = {**os.environ, **ONE_THREAD, "PYTHONUNBUFFERED": "1"}
        with self.log(out).open("ab") as log:
            return subprocess.Popen(words, cwd=self.folder, env=variables, stdout=log, stderr=subprocess.STDOUT)

    def go_on(self, out: str, *options: str) -> subprocess.Popen[bytes]:
        """The same with what a run before has left, whatever that is."""
        resume = ["--resume"] if RunDirectory.holds_run(self.folder / out) else []
        return self.start(out, *options, *resume)

    def log(self, out: str) -> Path:
        """What was printed by all processes that trained into a directory."""
        return self.folder / f"{out}.log"


def prepare_processes() -> None:
    """Child processes of this one compute in one thread: libraries read that when the fork server imports them."""
    before = dict(os.environ)
    os.environ.update(ONE_THREAD)
    try:
        processes.prepare()
    finally:
        os.environ.clear()
        os.environ.update(before)


FORK_SERVER = "multiprocessing.forkserver"


def child_processes(parent: int, words: Sequence[str]) -> list[int]:
    """Process ids of what a process has started, itself or by its fork server, that one of the words names."""
    parents, ages = dict[int, int](), dict[int, int]()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            parents[int(entry.name)], ages[int(entry.name)] = int(fields[1]), int(fields[19])
    found = [pid for pid, own in parents.items() if parent in (own, parents.get(own)) and is_named(pid, words)]
    return sorted(found, key=lambda pid: (ages[pid], pid))


def is_named(pid: int, words: Sequence[str]) -> bool:
    """Whether one of the words is in the name or the command of a process that lives."""
    with suppress(OSError):
        texts = [(Path("/proc") / str(pid) / file).read_text(errors="replace") for file in ("comm", "cmdline")]
        # The fork server's command names what it imports for its forks, which keep that command under their own names.
        searched = texts[:1] if FORK_SERVER in texts[1] else texts
        # One that has ended and whose exit code has not been read has a name, but no command.
        return bool(texts[1]) and any(word in text for word in words for text in searched)
    return False
