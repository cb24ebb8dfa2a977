"""Who is next when a place becomes free: first come, priority, or the deadline with least slack.

A policy is a queue of waiting jobs. `push` takes a job, `pop` gives the next, `peek` looks at it; all in O(log n).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from benchmarks.planning.replay.trace import TraceJob


@dataclass(slots=True)
class Waiting:
    """A job that waits, and what is left of it."""

    job: TraceJob
    left_s: float
    """Seconds it still takes alone on an instance."""


@dataclass
class FirstCome:
    """In order of arrival."""

    preempts: bool = False
    """A job may take the place of one of lower priority."""
    _heap: list[tuple[float, float, str, Waiting]] = field(default_factory=list)

    def push(self, waiting: Waiting) -> None:
        """Takes a job."""
        heapq.heappush(self._heap, (self._first(waiting), waiting.job.arrival_s, waiting.job.job, waiting))

    def peek(self, now_s: float) -> Waiting | None:
        """The next job; None if none waits."""
        return self._heap[0][-1] if self._heap else None

    def pop(self) -> Waiting:
        """Removes and returns the next job."""
        return heapq.heappop(self._heap)[-1]

    def _first(self, waiting: Waiting) -> float:
        return 0.0


@dataclass
class Priority(FirstCome):
    """The highest priority first, then in order of arrival; lower ones give way."""

    preempts: bool = True

    def _first(self, waiting: Waiting) -> float:
        return -waiting.job.priority


@dataclass
class Slack(FirstCome):
    """Least slack first: deadline minus now minus what is left. Jobs that are late anyway come last.

    All slack shrinks at one speed while jobs wait, so deadline minus what is left orders them once and for all.
    """

    _late: FirstCome = field(default_factory=FirstCome)

    def peek(self, now_s: float) -> Waiting | None:
        """The next job; None if none waits."""
        while self._heap and self._heap[0][0] < now_s:
            self._late.push(heapq.heappop(self._heap)[-1])
        return self._heap[0][-1] if self._heap else self._late.peek(now_s)

    def pop(self) -> Waiting:
        """Removes and returns the next job."""
        return super().pop() if self._heap else self._late.pop()

    def _first(self, waiting: Waiting) -> float:
        return waiting.job.deadline_s - waiting.left_s


POLICIES: dict[str, type[FirstCome]] = {"fcfs": FirstCome, "priority": Priority, "slo": Slack}
