"""Records what runs when, for a Chrome/Perfetto trace and for comparison with what the simulator predicts."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from weft.plan.simulate import timeline
from weft.plan.simulate.step_shares import STEP_SPAN
from weft.plan.simulate.timeline import Span, span_event, trace_json
from weft.store.wall_clock import Activity, WallClock

MAX_SPANS = 20_000
"""Spans kept; the oldest are dropped first."""
ACTIVITIES = {
    "forward_backward": Activity.COMPUTING,
    "step": Activity.COMPUTING,
    "eval": Activity.EVALUATING,
    "compile": Activity.COMPILING,
    "move": Activity.LOADING,
    "prepare": Activity.PREPARING,
    "checkpoint": Activity.WRITING,
    "adapter": Activity.WRITING,
    "write": Activity.WRITING,
}
"""Activities of the wall clock by span; other spans, such as planning, are not counted."""


class TimelineRecorder:
    def __init__(self, wall: WallClock | None = None) -> None:
        self.wall = wall or WallClock()
        self.offset_s = 0.0
        """Seconds of the run before this process."""
        self.spans: deque[Span] = deque(maxlen=MAX_SPANS)
        self._start = time.perf_counter()

    def now(self) -> float:
        return self.offset_s + self.own_s()

    def at(self, moment_s: float) -> float:
        return self.offset_s + moment_s - self._start

    def own_s(self) -> float:
        return time.perf_counter() - self._start

    @contextmanager
    def span(self, name: str, **args: Any) -> Iterator[dict[str, Any]]:
        """Records how long its body takes; the body may add arguments to the yielded dict."""
        begun_s = time.perf_counter()
        yield args
        ended_s = time.perf_counter()
        self.add(name, ended_s - begun_s, ended_s, **args)

    def add(self, name: str, seconds: float, ended_s: float, **args: Any) -> None:
        self.spans.append(Span(name, self.at(ended_s) - seconds, seconds, args))
        if name in ACTIVITIES:
            self.wall.add(ACTIVITIES[name], seconds, ended_s)

    def to_json(self) -> str:
        lanes = {"forward_backward": 1, "step": 2, "eval": 3, "checkpoint": 4, "adapter": 4, "plan": 5, "prepare": 6}
        lanes |= {"write": 7, "compile": 8, "move": 9, "forward": 1, "backward": 1, "reference": 1, "beside": 10}
        lanes[STEP_SPAN] = 11
        return trace_json([span_event(span, lanes.get(_name_of(span), 0)) for span in self.spans])

    def measured(self) -> timeline.Timeline:
        computes = dict.fromkeys(("forward_backward", "reference", "forward", "backward", "step"), timeline.COMPUTE)
        computes["beside"] = timeline.BESIDE
        spans = sorted(self.spans, key=lambda span: span.start_s)
        lanes = [computes.get(_name_of(span), span.name) for span in spans]
        return timeline.Timeline(
            tuple(dataclasses.replace(span, lane=lane) for span, lane in zip(spans, lanes, strict=True)),
            1 + max((span.stage for span in spans), default=0),
        )


def _name_of(span: Span) -> str:
    return "beside" if span.lane == timeline.BESIDE else span.name
