"""Job arrivals: drawn with the statistics of a published trace, or read from a CSV file.

The published week (seed system MuxTune, after Microsoft's Philly trace): 2.59 jobs a minute, durations of 372.6 min on
average with a standard deviation of 612.9, 128 GPUs. Arrivals are drawn as a Poisson process, durations from the
log-normal distribution with that mean and deviation. A duration is what the job takes alone on an instance of whatever
the trace was recorded with; a replay is given that instance.
"""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weft.errors import DataError

MINUTE_S = 60.0
WEEK_S = 7 * 24 * 60 * MINUTE_S
ARRIVALS_PER_S = 2.59 / MINUTE_S
DURATION_MEAN_S = 372.6 * MINUTE_S
DURATION_SD_S = 612.9 * MINUTE_S
SAMPLE_TOKENS = (23.3, 71.4, 75.8)
"""Mean lengths of the published workloads' data sets, SST2, OpenBookQA and RTE, counted with GPT-2's tokenizer."""
LONGEST_TOKENS = {2: (29, 77, 97), 4: (35, 83, 122), 8: (40, 89, 147)}
"""The longest sample of a batch on average, by batch size, of each: what a batch is padded to."""
BATCH_SIZES = (2, 4, 4, 4, 4, 8)
"""Their batch sizes, as often as they occur."""
URGENT_SHARE = 0.1
"""Of the jobs, so many have priority 1."""
SLACK_FACTORS = (2.0, 10.0)
"""A deadline is so many durations after the arrival."""
JOB_BYTES = 750_000_000
"""Adapter, gradients and moments of rank 16 on all linears of an 8B backbone."""


@dataclass(frozen=True, slots=True)
class TraceJob:
    """One job of a trace."""

    job: str
    arrival_s: float
    duration_s: float
    """Alone on an instance of what the trace was recorded with."""
    step_tokens: int
    """Tokens of a global batch, padding not counted."""
    deadline_s: float = math.inf
    priority: int = 0
    num_bytes: int = JOB_BYTES
    num_samples: int = 1
    """Samples of a global batch."""
    longest: int = 0
    """Tokens of the longest of them; 0: all are alike."""

    @property
    def padded_to(self) -> int:
        """Tokens that its own batches are padded to."""
        return self.longest or -(-self.step_tokens // self.num_samples)


def generate_trace(
    seed: int,
    *,
    horizon_s: float = WEEK_S,
    arrivals_per_s: float = ARRIVALS_PER_S,
    mean_s: float = DURATION_MEAN_S,
    sd_s: float = DURATION_SD_S,
) -> list[TraceJob]:
    """Jobs that arrive within the horizon, in order; the same for the same seed."""
    rng = np.random.default_rng(seed)
    count = rng.poisson(arrivals_per_s * horizon_s)
    arrivals = np.sort(rng.uniform(0.0, horizon_s, count))
    variance = math.log1p((sd_s / mean_s) ** 2)
    durations = rng.lognormal(math.log(mean_s) - variance / 2, math.sqrt(variance), count)
    data = rng.integers(0, len(SAMPLE_TOKENS), count)
    sizes = rng.choice(BATCH_SIZES, count)
    urgent = rng.random(count) < URGENT_SHARE
    slack = rng.uniform(*SLACK_FACTORS, count)
    return [
        TraceJob(
            job=f"job{i:06d}",
            arrival_s=float(arrivals[i]),
            duration_s=float(durations[i]),
            step_tokens=round(SAMPLE_TOKENS[data[i]] * sizes[i]),
            deadline_s=float(arrivals[i] + slack[i] * durations[i]),
            priority=int(urgent[i]),
            num_samples=int(sizes[i]),
            longest=LONGEST_TOKENS[int(sizes[i])][data[i]],
        )
        for i in range(count)
    ]


def write_trace(path: Path, trace: Sequence[TraceJob]) -> None:
    """Writes a trace as CSV, one job a line under the names of its fields."""
    names = [field.name for field in dataclasses.fields(TraceJob)]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows([getattr(job, name) for name in names] for job in trace)


def read_trace(path: Path) -> list[TraceJob]:
    """The jobs of a CSV file in order of arrival; all that has a default may be left out."""
    fields = {field.name: field for field in dataclasses.fields(TraceJob)}
    required = {name for name, field in fields.items() if field.default is dataclasses.MISSING}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            columns = set(reader.fieldnames or ())
            if not required <= columns or not columns <= fields.keys():
                raise DataError(
                    f"the columns are {', '.join(reader.fieldnames or ['none'])}; needed are "
                    f"{', '.join(n for n in fields if n in required)}, and "
                    f"{', '.join(n for n in fields if n not in required)} may be given.",
                    where=str(path),
                )
            jobs = [_read_row(row, f"{path} line {reader.line_num}") for row in reader]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot be read ({error}).", where=str(path)) from None
    if len({job.job for job in jobs}) != len(jobs):
        raise DataError("two jobs have one name; names must differ.", where=str(path))
    return sorted(jobs, key=lambda job: (job.arrival_s, job.job))


def _read_row(row: dict[str, str | None], where: str) -> TraceJob:
    whole = ("step_tokens", "priority", "num_bytes", "num_samples", "longest")
    kinds = {"job": str, **dict.fromkeys(whole, int)}
    values: dict[str, str | int | float] = {}
    for name, text in row.items():
        kind = kinds.get(name, float)
        try:
            values[name] = kind(text)
        except (TypeError, ValueError):
            word = "a whole number" if kind is int else "a number"
            raise DataError(f"{name} is {text!r}; use {word}.", where=where) from None
    job = TraceJob(**values)  # type: ignore[arg-type]
    if job.num_samples < 1 or job.longest < 0:
        raise DataError(
            f"num_samples {job.num_samples}, longest {job.longest}; they must be at least 1 and at least 0.",
            where=where,
        )
    if not (0 <= job.arrival_s < math.inf and 0 < job.duration_s < math.inf and job.step_tokens > 0):
        raise DataError(
            f"arrival_s {job.arrival_s:g}, duration_s {job.duration_s:g}, step_tokens {job.step_tokens}; they must be "
            "at least 0, above 0 and above 0.",
            where=where,
        )
    return job
