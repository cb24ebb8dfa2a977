"""The service's figures come from a service that really runs; what is read of its training is right."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from weft.bench.service.load import PARTS, TARGETS, Load, measure_load
from weft.bench.service.training import TrainedStep, read_steps, tokens_per_s


def test_load_when_measured_then_every_figure_is_there_and_plausible(monkeypatch):
    """A small load on a real service: 12 jobs, 8 clients of two tenants."""
    from weft.bench.service import load

    monkeypatch.setattr(load, "TENANTS", ("acme", "globex"))
    monkeypatch.setattr(load, "POLL_S", {"serve": 0.5})
    figures = measure_load(Load(num_jobs=12, num_clients=8, stretch_s=6.0, num_pairs=1))
    wanted = {key.replace("_1000_", "_12_") for key in TARGETS if "eager" not in key}
    assert len(wanted) == 6 and wanted <= figures.keys()
    for kind in ("retrieve", "list"):
        assert 0 < figures[f"serve_{kind}_p50_ms"] <= figures[f"serve_{kind}_p99_ms"] < 5000
    assert 0 < figures["serve_event_latency_p50_s"] <= figures["serve_event_latency_s"] < 10
    assert 0 < figures["serve_clients_cores"] < 1 and 0 < figures["serve_api_cores"] < 1
    assert -0.5 < figures["serve_worker_cpu_lost"] < 0.5
    quiet, busy = figures["serve_tokens_per_s_quiet"], figures["serve_tokens_per_s_busy"]
    assert quiet > 0 and busy > 0
    assert figures["serve_training_slowed"] == pytest.approx(1 - busy / quiet)
    assert PARTS["load"] is measure_load


def test_steps_when_read_from_metrics_then_have_their_wall_time_and_their_tokens(tmp_path: Path):
    def write(job: str, lines: list[tuple[int, float, int]], changed_at: float) -> None:
        path = tmp_path / "work" / "worker-1" / f"{job}.3" / "metrics.jsonl"
        path.parent.mkdir(parents=True)
        text = "".join(json.dumps({"step": s, "time": t, "num_tokens": n}) + "\n" for s, t, n in lines)
        path.write_text(text + '{"step": 9, "eval_loss": 1.0, "time": 9.0}\n{"step": 10, "ti')
        os.utime(path, (changed_at, changed_at))

    write("ftjob-a", [(1, 1.0, 10), (2, 3.0, 25)], changed_at=1003.0)
    write("ftjob-b", [(1, 2.0, 8)], changed_at=1002.5)
    found = sorted(read_steps(tmp_path), key=lambda step: step.at)
    assert found == [
        TrainedStep("ftjob-a", 1, 1001.0, 10),
        TrainedStep("ftjob-b", 1, 1002.0, 8),
        TrainedStep("ftjob-a", 2, 1003.0, 15),
    ]


def test_tokens_per_s_when_the_span_cuts_a_round_then_counts_whole_rounds_only():
    """Two jobs of 30 and 70 tokens take turns: a round is 2 s, however the span lies."""
    steps = [
        TrainedStep(job, n, 2.0 * n + late, tokens)
        for n in range(20)
        for job, late, tokens in (("a", 0, 30), ("b", 0.1, 70))
    ]
    for start, end in ((0.0, 38.2), (3.9, 10.0), (4.05, 9.95), (7.0, 12.5)):
        assert tokens_per_s(steps, start, end) == pytest.approx(50)
    slower = [TrainedStep(step.job, step.step, step.at * 1.25, step.tokens) for step in steps]
    assert tokens_per_s(slower, 7.0, 20.0) == pytest.approx(40)


def test_tokens_per_s_when_no_job_has_two_steps_then_is_nothing():
    steps = [TrainedStep("a", 1, 10.0, 5), TrainedStep("b", 1, 14.0, 100)]
    assert tokens_per_s(steps, 0.0, 20.0) == tokens_per_s(steps, 20.0, 30.0) == 0
