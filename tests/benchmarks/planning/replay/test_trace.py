"""Traces: the published statistics, the same for a seed, and a CSV that comes back as it was."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks.planning.replay.trace import (
    BATCH_SIZES,
    DURATION_MEAN_S,
    DURATION_SD_S,
    SAMPLE_TOKENS,
    TraceJob,
    generate_trace,
    read_trace,
    write_trace,
)
from weft.errors import DataError


@pytest.fixture(scope="module")
def week():
    return generate_trace(0)


def test_trace_when_a_week_is_drawn_then_has_the_published_statistics(week):
    expected = 2.59 * 7 * 24 * 60
    assert abs(len(week) - expected) < 4 * math.sqrt(expected)
    durations = np.array([job.duration_s for job in week])
    assert durations.mean() == pytest.approx(372.6 * 60, rel=0.04)
    assert durations.std() == pytest.approx(612.9 * 60, rel=0.15)
    # The logarithms are more informative, because they have no heavy tail.
    variance = math.log1p((612.9 / 372.6) ** 2)
    assert np.log(durations).var() == pytest.approx(variance, rel=0.04)
    gaps = np.diff([job.arrival_s for job in week])
    assert gaps.min() >= 0 and gaps.mean() == pytest.approx(60 / 2.59, rel=0.03)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05), "arrivals are Poisson"


def test_trace_when_drawn_then_jobs_follow_the_workloads(week):
    allowed = {round(length * size) for length in SAMPLE_TOKENS for size in BATCH_SIZES}
    assert {job.step_tokens for job in week} == allowed
    assert all(job.step_tokens <= job.num_samples * job.padded_to for job in week), "padding adds tokens"
    assert 0.08 < sum(job.priority for job in week) / len(week) < 0.12
    factors = [(job.deadline_s - job.arrival_s) / job.duration_s for job in week]
    assert min(factors) >= 2 - 1e-6 and max(factors) <= 10 + 1e-6
    assert len({job.job for job in week}) == len(week)


def test_trace_when_the_seed_is_the_same_then_the_trace_is(week):
    assert generate_trace(0) == week
    assert generate_trace(1)[:5] != week[:5]
    short = generate_trace(0, horizon_s=3600, arrivals_per_s=0.1, mean_s=60, sd_s=1)
    assert abs(len(short) - 360) < 80 and max(job.arrival_s for job in short) < 3600
    assert np.mean([job.duration_s for job in short]) == pytest.approx(60, rel=0.01)
    assert (DURATION_MEAN_S, DURATION_SD_S) == (372.6 * 60, 612.9 * 60)


def test_csv_when_written_then_comes_back(week, tmp_path: Path):
    path = tmp_path / "trace.csv"
    write_trace(path, week[:50])
    assert read_trace(path) == week[:50]


def test_csv_when_columns_are_left_out_or_rows_unsorted_then_defaults_and_order(tmp_path: Path):
    path = tmp_path / "trace.csv"
    path.write_text("job,arrival_s,duration_s,step_tokens\nb,2,5,64\na,1,4,128\n")
    assert read_trace(path) == [TraceJob("a", 1.0, 4.0, 128), TraceJob("b", 2.0, 5.0, 64)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("job,arrival_s\n", "the columns are job, arrival_s; needed are job, arrival_s, duration_s, step_tokens, and"),
        ("job,arrival_s,duration_s,step_tokens,color\n", "the columns are job.*color; needed are"),
        ("", "the columns are none; needed are"),
        ("job,arrival_s,duration_s,step_tokens\na,1,2,3\nb,x,2,3\n", "line 3: arrival_s is 'x'; use a number"),
        ("job,arrival_s,duration_s,step_tokens\na,1,2,3.5\n", r"line 2: step_tokens is '3.5'; use a whole number"),
        ("job,arrival_s,duration_s,step_tokens\na,1,2\n", "line 2: step_tokens is None; use a whole number"),
        ("job,arrival_s,duration_s,step_tokens\na,1,0,3\n", "line 2: arrival_s 1, duration_s 0, step_tokens 3; they"),
        ("job,arrival_s,duration_s,step_tokens\na,nan,1,3\n", "line 2: arrival_s nan"),
        ("job,arrival_s,duration_s,step_tokens\na,1,1,3\na,2,1,3\n", "two jobs have one name"),
    ],
    ids=["missing", "unknown", "empty", "number", "whole", "short", "zero", "nan", "twice"],
)
def test_csv_when_wrong_then_reports_where_and_what(tmp_path: Path, text, message):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_trace(path)


def test_csv_when_there_is_no_file_then_reports_it(tmp_path: Path):
    with pytest.raises(DataError, match=r"nowhere\.csv: cannot be read"):
        read_trace(tmp_path / "nowhere.csv")
