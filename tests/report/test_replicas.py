"""Steps that replicas share, in the report and on the run's last lines."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from synthetic_run import write_json, write_run

from weft.plan.simulate.step_shares import STEP_SPAN, ReplicaShare
from weft.plan.simulate.timeline import Span, span_event, trace_json
from weft.report.page import render
from weft.report.read_run import read_run
from weft.report.readable import dispatched, percent


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Four steps on two replicas; the first two before passes were measured."""
    path = write_run(tmp_path / "run")
    events = [
        span_event(Span(STEP_SPAN, step, 0.5, dataclasses.asdict(share), share.replica), 11)
        for step in range(4)
        for share in (
            ReplicaShare(0, 100 + step, 60, 9.0 if step < 2 else 0.4, 0.41, 0.8, is_learnt=step >= 2),
            ReplicaShare(1, 300, 250 + step, 9.0 if step < 2 else 0.45, 0.5, 0.98, is_learnt=step >= 2),
        )
    ]
    known = json.loads((path / "timeline.json").read_text())["traceEvents"]
    (path / "timeline.json").write_text(trace_json([*known, *events, {**events[0], "args": {"replica": 0}}]))
    info = json.loads((path / "run.json").read_text())
    write_json(path / "run.json", {**info, "layouts": ["stages:1+stages:2"]})
    return path


def test_report_when_replicas_share_steps_then_shows_each_replica_and_how_good_the_prediction_is(shared):
    run = read_run(shared)
    assert [step.is_learnt for step in run.steps] == [False, False, True, True] and len(run.compared_steps) == 2
    small, large = run.replica_means
    assert (small.tokens, small.longest, small.seconds, small.predicted_s) == (102.5, 60, 0.41, 0.4)
    assert (large.longest, large.busy) == (253, 0.98)
    busy = f"{percent(0.8)}, {percent(0.98)}"
    assert dispatched(run) == (
        f"2 steps of 2 replicas took 0.5 s each, predicted 0.45 s from measured passes; busy {busy}"
    )
    page = render(run)
    text = re.sub(r"<[^>]+>", " ", page[: page.index('id="figures"')])
    assert "replica 1 (stages:2)" in text and "line predicted from measured passes" in text
    figure = json.loads(re.search(r'id="figures">(.*?)</script>', page, re.DOTALL)[1])["dispatch"]  # type: ignore[index]
    assert [trace["y"] for trace in figure["data"]] == [[0.5, 0.5], [0.45, 0.45]]
    assert not any(span.name == STEP_SPAN for span in run.spans)


def test_report_when_no_replicas_share_steps_then_omits_them(run_dir):
    run = read_run(run_dir)
    assert dispatched(run) is None and run.steps == () and "<h2>Replicas</h2>" not in render(run)
