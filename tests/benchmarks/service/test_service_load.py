"""The service's figures come from a service that really runs; what is read of its training is right."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks.service.load import PARTS, TARGETS, Listener, Load, Stretches, measure_load
from benchmarks.service.process import Service, TrainedStep, read_steps, tokens_per_s


@pytest.mark.slow
def test_load_when_measured_then_every_figure_is_there_and_plausible(monkeypatch):
    """A small load on a real service: 12 jobs, 8 clients of two tenants."""
    from benchmarks.service import load

    monkeypatch.setattr(load, "TENANTS", ("acme", "globex"))
    monkeypatch.setattr(load, "POLL_S", {"serve": 0.5})
    figures = measure_load(Load(num_jobs=12, num_clients=8, stretch_s=6.0, num_pairs=1))
    # On a machine that is busy with other things, no job may have trained two steps in so short a time.
    unsure = {"serve_training_slowed", "serve_worker_cpu_lost", "serve_event_latency_s", "serve_event_latency_p50_s"}
    wanted = {key.replace("_1000_", "_12_") for key in TARGETS if "eager" not in key and "contended" not in key}
    assert len(wanted) == 6 and wanted - unsure <= figures.keys()
    for kind in ("retrieve", "list"):
        assert 0 < figures[f"serve_{kind}_p50_ms"] <= figures[f"serve_{kind}_p99_ms"]
    assert figures["serve_clients_cores"] > 0 and figures["serve_api_cores"] > 0
    assert PARTS["load"] is measure_load


def stretches(steps_of_busy: int) -> tuple[Stretches, list[TrainedStep]]:
    """A quiet and a busy time of 10 s each: a step a second in the quiet one, some in the busy one."""
    made = Stretches(Service(0, Path("nowhere"), 0), quiet=[(0.0, 10.0)], busy=[(10.0, 20.0)])
    made.milliseconds = {"retrieve": [1.0, 3.0], "list": [2.0]}
    made.worker_cores = {"quiet": [0.5], "busy": [0.25]}
    made.cpu_s.update(api=1.0, clients=2.0)
    quiet = [TrainedStep("a", n, float(n), 10) for n in range(10)]
    return made, [*quiet, *(TrainedStep("a", 10 + n, 10.0 + 2 * n, 10) for n in range(steps_of_busy))]


def test_figures_when_training_was_slower_beside_clients_then_report_by_how_much():
    made, steps = stretches(steps_of_busy=5)
    listener = Listener(made.service, "a", "key", seen={11: 12.25})
    figures = made.figures("serve", steps, listener)
    assert figures["serve_training_slowed"] == pytest.approx(0.5)
    assert figures["serve_worker_cpu_lost"] == pytest.approx(0.5)
    assert figures["serve_event_latency_s"] == pytest.approx(0.25)
    assert (figures["serve_api_cores"], figures["serve_clients_cores"]) == (0.1, 0.2)
    assert (figures["serve_retrieve_p50_ms"], figures["serve_retrieve_p99_ms"]) == (3.0, 3.0)


def test_figures_when_nothing_was_trained_in_the_quiet_time_then_what_is_unknown_is_left_out():
    """A machine that is busy with other things divides by no time."""
    made, _ = stretches(steps_of_busy=0)
    made.worker_cores["quiet"] = [0.0]
    figures = made.figures("serve", [], Listener(made.service, "a", "key"))
    assert not {"serve_training_slowed", "serve_worker_cpu_lost", "serve_event_latency_s"} & figures.keys()
    assert figures["serve_list_p99_ms"] == 2.0


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
