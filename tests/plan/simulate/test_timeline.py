"""A timeline counts, draws and exports what ran, measured or predicted."""

from __future__ import annotations

import itertools
import json

import pytest

from weft.engine.timeline import TimelineRecorder as Recorder
from weft.plan.cost.types import LinearCost
from weft.plan.pipeline.build import Schedule, build
from weft.plan.simulate.interpret import simulate
from weft.plan.simulate.timeline import COMPUTE, SEND, Span, Timeline, gantt
from weft.plan.types import Microbatch, Segment


def pipeline() -> Timeline:
    stream = [Microbatch((Segment("a", 0, i, 1),)) for i in range(2)]
    return simulate(build(Schedule.GPIPE, stream, 2), LinearCost(send_s=0.5))


def test_bubble_ratio_counts_computation_only_and_clips_at_the_window() -> None:
    """Half of one stage of two is busy; sending does not count."""
    spans = (Span("forward", 0.0, 2.0, {}, 0, COMPUTE), Span("send", 2.0, 2.0, {}, 0, SEND))
    timeline = Timeline(spans, num_stages=2)
    assert timeline.makespan_s == 4.0 and timeline.bubble_ratio() == pytest.approx(0.75)
    assert timeline.bubble_ratio(1.0, 3.0) == pytest.approx(0.75) and timeline.bubble_ratio(0.0, 2.0) == pytest.approx(
        0.5
    )
    assert Timeline(()).bubble_ratio() == 0.0


def test_trace_opens_with_a_process_per_stage_and_no_overlap_within_a_thread() -> None:
    """Every span is there, in microseconds, and the memory as a counter."""
    timeline = pipeline()
    events = json.loads(timeline.to_json())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == len(timeline.spans)
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {1: "stage 0", 2: "stage 1"}
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 2} == {
        "compute",
        "send",
        "receive",
    }
    threads: dict[tuple[int, int], list[dict[str, int]]] = {}
    for event in spans:
        threads.setdefault((event["pid"], event["tid"]), []).append(event)
    for own in threads.values():
        own.sort(key=lambda e: e["ts"])
        assert all(one["ts"] + one["dur"] <= two["ts"] for one, two in itertools.pairwise(own))
    assert [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["pid"] == 1] == [1, 2, 1, 0]
    first = next(e for e in spans if e["name"] == "backward" and e["pid"] == 2)
    assert first["ts"] == 3_500_000 and first["dur"] == 1_000_000


def test_gantt_draws_one_line_per_stage_and_one_character_per_tick() -> None:
    """Forwards, backwards and idle time at their places."""
    stream = [Microbatch((Segment("a", 0, i, 1),)) for i in range(2)]
    timeline = simulate(build(Schedule.GPIPE, stream, 2), LinearCost())
    assert gantt(timeline, width=6) == "stage 0 ▒▒··██\nstage 1 ·▒▒██·"
    mostly_idle = Timeline((Span("forward", 0.0, 0.4, {}, 0, COMPUTE), Span("backward", 1.0, 1.0, {}, 0, COMPUTE)))
    assert gantt(mostly_idle, width=2) == "stage 0 ·█"
    assert gantt(Timeline(())) == ""


def test_measured_run_has_the_form_of_a_predicted_one() -> None:
    """Training and stepping are computation; planning and saving are lanes of their own."""
    recorder = Recorder()
    for name in ("plan", "forward_backward", "step"):
        with recorder.span(name, jobs={"a": 1}):
            pass
    measured = recorder.measured()
    assert [(s.name, s.lane, s.stage) for s in measured.spans] == [
        ("plan", "plan", 0),
        ("forward_backward", COMPUTE, 0),
        ("step", COMPUTE, 0),
    ]
    assert measured.makespan_s == pytest.approx(recorder.spans[-1].end_s)
    events = json.loads(recorder.to_json())["traceEvents"]
    assert [(e["name"], e["pid"], e["tid"], e["args"]) for e in events][1] == (
        "forward_backward",
        1,
        1,
        {"jobs": {"a": 1}},
    )
