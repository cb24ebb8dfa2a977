"""What has been done and not been told yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from weft.engine.events import Event, StepDone


class EventQueue:
    """Events in the order in which they happened; stages take several steps of a job before the first is told."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()

    def __bool__(self) -> bool:
        return bool(self._events)

    def add(self, events: Iterable[Event]) -> None:
        """They have happened after all others."""
        self._events.extend(events)

    def next(self) -> Event:
        """The oldest; it counts as told."""
        return self._events.popleft()

    def has_step(self, job: str) -> bool:
        """Whether a job has taken a later step than the last one that was told."""
        return any(isinstance(event, StepDone) and event.job == job for event in self._events)
