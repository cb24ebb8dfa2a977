"""What the worker of a service did and when, read from the metrics.jsonl of its jobs.

A line has the seconds since the worker's engine began. A file's time of change less those of its last line is when
that was: every line is written as soon as its step is done, so the least over all files is off by milliseconds.
"""

from __future__ import annotations

import bisect
import itertools
import json
import statistics
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TrainedStep:
    """One optimizer step of one job."""

    job: str
    step: int
    at: float
    """Unix seconds when it was done."""
    tokens: int


def read_steps(data_dir: Path) -> list[TrainedStep]:
    """All steps so far of all jobs that train."""
    files = {path: _records(path) for path in data_dir.glob("work/*/*/metrics.jsonl")}
    began = min((path.stat().st_mtime - lines[-1]["time"] for path, lines in files.items() if lines), default=0.0)
    steps = []
    for path, lines in files.items():
        before = 0.0
        for line in lines:
            job, tokens = path.parent.name.partition(".")[0], line["num_tokens"] - before
            steps.append(TrainedStep(job, int(line["step"]), began + line["time"], int(tokens)))
            before = line["num_tokens"]
    return steps


def tokens_per_s(steps: list[TrainedStep], start: float, end: float) -> float:
    """Tokens of all jobs per second in a span of time; 0 if no job has two steps in it.

    Jobs take turns, and all of a round end at nearly the same time. So a job's time from one of its steps to another is
    that of whole rounds, which the span itself is not; the mean over jobs.
    """
    ordered = sorted(steps, key=lambda step: step.at)
    ends, totals = [step.at for step in ordered], [0, *itertools.accumulate(step.tokens for step in ordered)]
    of_job: dict[str, list[float]] = {}
    for at, step in zip(ends, ordered, strict=True):
        if start <= at <= end:
            of_job.setdefault(step.job, []).append(at)
    rates = []
    for first, *_, last in (times for times in of_job.values() if len(times) > 1):
        tokens = totals[bisect.bisect_right(ends, last)] - totals[bisect.bisect_right(ends, first)]
        rates.append(tokens / (last - first))
    return statistics.mean(rates) if rates else 0.0


def _records(path: Path) -> list[dict[str, float]]:
    """The training lines of a file; one that is being written is left out."""
    *whole, _ = path.read_text(encoding="utf-8").split("\n")
    return [line for line in map(json.loads, whole) if "num_tokens" in line]
