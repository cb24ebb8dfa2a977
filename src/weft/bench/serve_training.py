"""What the worker of a service did and when, read from the metrics.jsonl of its jobs.

A line has the seconds since the worker's engine began. A file's time of change less those of its last line is when
that was: every line is written as soon as its step is done, so the least over all files is off by milliseconds.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Step:
    """One optimizer step of one job."""

    job: str
    step: int
    at: float
    """Unix seconds when it was done."""
    tokens: int


def read_steps(data_dir: Path) -> list[Step]:
    """All steps so far of all jobs that train."""
    files = {path: _records(path) for path in data_dir.glob("work/*/*/metrics.jsonl")}
    began = min((path.stat().st_mtime - lines[-1]["time"] for path, lines in files.items() if lines), default=0.0)
    steps = []
    for path, lines in files.items():
        before = 0.0
        for line in lines:
            job, tokens = path.parent.name.partition(".")[0], line["num_tokens"] - before
            steps.append(Step(job, int(line["step"]), began + line["time"], int(tokens)))
            before = line["num_tokens"]
    return steps


def tokens_per_s(steps: list[Step], start: float, end: float) -> float:
    """Tokens trained in a span of time; a step counts by the part of its time that lies in it."""
    ends = sorted({step.at for step in steps})
    tokens = dict.fromkeys(ends, 0)
    for step in steps:
        tokens[step.at] += step.tokens
    total = 0.0
    for before, at in itertools.pairwise(ends):
        inside = min(at, end) - max(before, start)
        total += tokens[at] * max(0.0, inside) / (at - before)
    return total / (end - start)


def _records(path: Path) -> list[dict[str, float]]:
    """The training lines of a file; one that is being written is left out."""
    *whole, _ = path.read_text(encoding="utf-8").split("\n")
    return [line for line in map(json.loads, whole) if "num_tokens" in line]
