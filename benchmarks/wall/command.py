"""One command in a fresh process, by the wall clock, and what its run directory tells of the time in between."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.train_command import child_variables
from weft.data.prepared.cache import PLACE_VARIABLE
from weft.errors import WeftError

TAIL = 2000
"""Characters of a failed command's output that are shown."""


@dataclass(frozen=True)
class WallTime:
    """What one command took."""

    wall_s: float
    spans: Mapping[str, float]
    """Seconds of each kind of work in the run's timeline; empty for other programs than Weft."""
    before_first_s: float = 0.0
    """From the command to the first microbatch."""
    training_s: float = 0.0
    """From the start of the first microbatch to the end of the last."""

    @property
    def line(self) -> str:
        """All of it for people."""
        spans = ", ".join(f"{name} {seconds:.1f}" for name, seconds in sorted(self.spans.items()))
        return f"{self.wall_s:.1f} s; first microbatch after {self.before_first_s:.1f} s; {spans}"


def caches(folder: Path) -> dict[str, str]:
    """Variables that let a process keep what it may keep in a folder of its own: a new machine, if that is empty."""
    # Python's own, too: where nobody may write beside the libraries, it would compile them at every start.
    return {
        "XDG_CACHE_HOME": str(folder),
        PLACE_VARIABLE: str(folder / "data"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "PYTHONPYCACHEPREFIX": str(folder / "python"),
        "PYTHONDONTWRITEBYTECODE": "",
    }


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


def time_train(jobs_file: Path, out: Path, variables: Mapping[str, str]) -> WallTime:
    """`weft train` of a jobs file into a new run directory."""
    log = out.with_name(out.name + ".log")
    started = time.time()
    wall_s = timed(["weft", "train", str(jobs_file), "--out", str(out)], variables, log)
    events = json.loads((out / "timeline.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    totals: Counter[str] = Counter()
    for span in spans:
        totals[span["name"]] += span["dur"] / 1e6
    passes = [span for span in spans if span["name"] == "forward_backward"]
    first = min(span["ts"] for span in passes) / 1e6
    last = max(span["ts"] + span["dur"] for span in passes) / 1e6
    end = (out / "timeline.json").stat().st_mtime - started
    longest = max(span["ts"] + span["dur"] for span in spans) / 1e6
    return WallTime(wall_s, dict(totals), before_first_s=end - longest + first, training_s=last - first)
