"""Whose time it was: each trial's part of what the engine spent on microbatches, steps and evaluations."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from weft.engine.timeline import TimelineRecorder
from weft.plan.simulate.timeline import Span
from weft.sweeps.record.trials_file import Trial

_SHARED = ("forward_backward", "step", "eval", "checkpoint")


class TrialTime:
    """Reads an engine's timeline as it grows."""

    def __init__(self, timeline: TimelineRecorder) -> None:
        self._timeline = timeline
        self._last: Span | None = None
        """The last one that has been looked at."""
        self.training_s = 0.0
        """Spent on microbatches and steps, over all trials."""
        self.training_tokens = 0
        """In those microbatches."""

    def catch_up(self, trials: Mapping[str, Trial]) -> None:
        """Adds what is new to the trials' seconds: by tokens where there are any, else in equal parts."""
        fresh = list(itertools.takewhile(lambda span: span is not self._last, reversed(self._timeline.spans)))
        self._last = fresh[0] if fresh else self._last
        for span in (span for span in fresh if span.name in _SHARED):
            jobs: dict[str, int] = span.args["jobs"]
            self.training_s += span.duration_s if span.name in ("forward_backward", "step") else 0.0
            total = sum(jobs.values())
            self.training_tokens += total if span.name == "forward_backward" else 0
            for name, tokens in jobs.items():
                if name in trials:
                    trials[name].seconds += span.duration_s * (tokens / total if total else 1 / len(jobs))
