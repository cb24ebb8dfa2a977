"""`weft train` as a process of its own that something may happen to, and a process that it has started."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from weft.store.run_dir import RunDirectory

ONE_THREAD = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
"""What the environment of every process here says."""
JOBS_FILE = "jobs.yaml"


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


def child_processes(parent: int, word: str) -> list[int]:
    """Process ids of the children of a process whose command has a word in it, the oldest first."""
    found: list[tuple[int, int]] = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            status, command = (place / "stat").read_text(), (place / "cmdline").read_text(errors="replace")
        except OSError:
            continue
        fields = status.rpartition(")")[2].split()
        if int(fields[1]) == parent and word in command:
            found.append((int(fields[19]), int(place.name)))
    return [pid for _, pid in sorted(found)]
