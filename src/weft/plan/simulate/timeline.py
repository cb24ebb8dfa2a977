"""Spans of time, measured or predicted, in one form, so that both can be compared event by event.

A timeline is written as a trace for a browser, or drawn in characters, one line per stage.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

COMPUTE = "compute"
BESIDE = "compute beside"
"""Lane of the second pass of a pair; busy time counts only the first."""
SEND = "send"
RECEIVE = "receive"
RECEIVE_GRADIENT = "receive gradient"
IDLE = "·"
MARKS = {"forward": "▒", "backward": "█", "forward_backward": "█", "step": "|"}


@dataclass(frozen=True, slots=True)
class Span:
    name: str
    start_s: float
    duration_s: float
    args: Mapping[str, Any]
    stage: int = 0
    lane: str = ""

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_s


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    stage: int
    time_s: float
    held_bytes: int


@dataclass(frozen=True)
class Timeline:
    spans: tuple[Span, ...]
    num_stages: int = 1
    memory: tuple[MemoryPoint, ...] = ()

    @property
    def makespan_s(self) -> float:
        return max((span.end_s for span in self.spans), default=0.0)

    def busy_s(self, stage: int, start_s: float = 0.0, end_s: float = float("inf")) -> float:
        return sum(
            max(0.0, min(span.end_s, end_s) - max(span.start_s, start_s))
            for span in self.spans
            if span.stage == stage and span.lane == COMPUTE
        )

    def bubble_ratio(self, start_s: float = 0.0, end_s: float | None = None) -> float:
        """Idle share of the stages' time, over the whole run or between two moments."""
        end = self.makespan_s if end_s is None else end_s
        area = (end - start_s) * self.num_stages
        if area <= 0:
            return 0.0
        return 1.0 - sum(self.busy_s(stage, start_s, end) for stage in range(self.num_stages)) / area

    def peak_bytes(self, stage: int) -> int:
        return max((point.held_bytes for point in self.memory if point.stage == stage), default=0)

    def to_json(self) -> str:
        """The run in Chrome's trace format for Perfetto: a process per stage, a thread per lane."""
        lanes = list(dict.fromkeys((span.stage, span.lane) for span in sorted(self.spans, key=_by_lane)))
        threads = {lane: number for number, lane in enumerate(lanes, start=1)}
        events = [
            {"name": "process_name", "ph": "M", "pid": stage + 1, "args": {"name": f"stage {stage}"}}
            for stage in range(self.num_stages)
        ]
        events += [
            {"name": "thread_name", "ph": "M", "pid": stage + 1, "tid": thread, "args": {"name": lane}}
            for (stage, lane), thread in threads.items()
        ]
        events += [span_event(span, threads[span.stage, span.lane]) for span in self.spans]
        events += [
            {
                "name": "held",
                "ph": "C",
                "ts": point.time_s * 1e6,
                "pid": point.stage + 1,
                "args": {"bytes": point.held_bytes},
            }
            for point in self.memory
        ]
        return trace_json(events)


def span_event(span: Span, thread: int) -> dict[str, Any]:
    """A span as an event of Chrome's trace format, at least a microsecond long to be visible."""
    return {
        "name": span.name,
        "ph": "X",
        "ts": round(span.start_s * 1e6),
        "dur": max(1, round(span.duration_s * 1e6)),
        "pid": span.stage + 1,
        "tid": thread,
        "args": dict(span.args),
    }


def trace_json(events: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps({"traceEvents": list(events), "displayTimeUnit": "ms"})


def _by_lane(span: Span) -> tuple[int, int]:
    order = (COMPUTE, BESIDE, SEND, RECEIVE, RECEIVE_GRADIENT)
    return span.stage, order.index(span.lane) if span.lane in order else len(order)


def gantt(timeline: Timeline, width: int = 100, names: Sequence[str] | None = None) -> str:
    tick = timeline.makespan_s / width
    if tick <= 0:
        return ""
    spent: list[list[dict[str, float]]] = [[{} for _ in range(width)] for _ in range(timeline.num_stages)]
    for span in timeline.spans:
        if span.lane == COMPUTE:
            _add(spent[span.stage], span, tick)
    names = names or [f"stage {stage}" for stage in range(timeline.num_stages)]
    margin = max(map(len, names))
    return "\n".join(
        f"{name:<{margin}} " + "".join(_character(cell, tick) for cell in cells)
        for name, cells in zip(names, spent, strict=True)
    )


def _add(cells: list[dict[str, float]], span: Span, tick: float) -> None:
    first = int(span.start_s / tick)
    last = min(len(cells) - 1, int(span.end_s / tick))
    for index in range(first, last + 1):
        left = index * tick
        overlap = min(span.end_s, left + tick) - max(span.start_s, left)
        if overlap > 0:
            cells[index][span.name] = cells[index].get(span.name, 0.0) + overlap


def _character(cell: dict[str, float], tick: float) -> str:
    """The mark of the longest span, or idle if the stage was idle for longer."""
    if not cell or sum(cell.values()) < tick / 2:
        return IDLE
    return MARKS.get(max(sorted(cell), key=lambda name: cell[name]), IDLE)
