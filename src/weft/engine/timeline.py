"""What ran when, as a Chrome/Perfetto trace."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

MAX_SPANS = 20_000
"""Spans kept; older ones go first."""


@dataclass(frozen=True, slots=True)
class Span:
    """One thing that took time."""

    name: str
    start_s: float
    duration_s: float
    args: Mapping[str, Any]


class Timeline:
    """Spans since the start of a run."""

    def __init__(self, offset_s: float = 0.0) -> None:
        self.offset_s = offset_s
        """Seconds of the run that came before this process."""
        self.spans: deque[Span] = deque(maxlen=MAX_SPANS)
        self._start = time.perf_counter()

    def now(self) -> float:
        """Seconds since the run started."""
        return self.offset_s + time.perf_counter() - self._start

    @contextmanager
    def span(self, name: str, **args: Any) -> Iterator[dict[str, Any]]:
        """Records how long its body takes; the body may add arguments to the yielded dict."""
        start = self.now()
        yield args
        self.spans.append(Span(name, start, self.now() - start, args))

    def to_json(self) -> str:
        """The spans in Chrome's trace format, which Perfetto opens."""
        lanes = {"forward_backward": 1, "step": 2, "eval": 3, "checkpoint": 4, "plan": 5, "prepare": 6}
        events = [
            {
                "name": span.name,
                "ph": "X",
                "ts": round(span.start_s * 1e6),
                "dur": max(1, round(span.duration_s * 1e6)),
                "pid": 1,
                "tid": lanes.get(span.name, 0),
                "args": dict(span.args),
            }
            for span in self.spans
        ]
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
