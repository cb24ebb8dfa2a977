"""Whose time it was: each trial's part of what the engine spent on microbatches, steps and evaluations."""

from __future__ import annotations

import math
from collections.abc import Mapping

from weft.engine.timeline import Timeline
from weft.sweep.trial import Trial

_SHARED = ("forward_backward", "step", "eval", "checkpoint")


class Shares:
    """Reads an engine's timeline as it grows."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._until_s = -math.inf
        """When the last span that has been counted began."""
        self.training_s = 0.0
        """Spent on microbatches and steps, over all trials."""
        self.training_tokens = 0
        """In those microbatches."""

    def catch_up(self, trials: Mapping[str, Trial]) -> None:
        """Adds what is new to the trials' seconds: by tokens where there are any, else in equal parts."""
        fresh = []
        for span in reversed(self._timeline.spans):
            if span.name in _SHARED:
                if span.start_s <= self._until_s:
                    break
                fresh.append(span)
        if not fresh:
            return
        self._until_s = fresh[0].start_s
        for span in fresh:
            jobs: dict[str, int] = span.args["jobs"]
            self.training_s += span.duration_s if span.name in ("forward_backward", "step") else 0.0
            total = sum(jobs.values())
            self.training_tokens += total if span.name == "forward_backward" else 0
            for name, tokens in jobs.items():
                if name in trials:
                    trials[name].seconds += span.duration_s * (tokens / total if total else 1 / len(jobs))
