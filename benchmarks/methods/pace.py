"""How fast an engine trains jobs, from the moment when all of them are under way to the last step but one of all.

The last step is left out: behind it jobs are closed, and their weights leave the device one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.clock import peak_gb, release
from weft.data.dataset import JobData
from weft.engine.engine import Engine
from weft.engine.events import JobFailed, MicrobatchDone, StepDone
from weft.errors import WeftError
from weft.model.backbone import Backbone
from weft.spec import JobSpec

WARM_UP = 4
"""Steps of every job before time counts: kernels are compiled, graphs captured and moments there."""


@dataclass(frozen=True)
class Pace:
    """What was seen."""

    tokens: int
    """Of all microbatches, those that teach nothing included."""
    heard: int
    """Rows that went through references besides, forward only."""
    trained: int
    """Of the samples that steps were taken on."""
    seconds: float
    alone: dict[str, tuple[int, float]]
    """Tokens and seconds of microbatches that only one job had rows in, by job."""
    peak_gb: float

    @property
    def tokens_per_s(self) -> float:
        """The speed of all jobs together; a row that goes forward only is half of one that also goes back."""
        return (self.tokens + self.heard / 2) / self.seconds

    @property
    def trained_per_s(self) -> float:
        """The same without what ran for comparison only."""
        return self.trained / self.seconds

    def seconds_per_token(self, foreign: str = "") -> float:
        """Of microbatches that are not one job's alone."""
        tokens, seconds = self.alone.get(foreign, (0, 0.0))
        return (self.seconds - seconds) / (self.tokens - tokens)


def measure_pace(backbone: Backbone, jobs: Sequence[tuple[JobSpec, JobData]], capacity: int) -> Pace:
    """Trains the jobs to their end; leaves the backbone without adapters."""
    backbone.path.forget()
    release(backbone.device)
    engine = Engine(backbone, capacity=capacity)
    for spec, data in jobs:
        engine.submit(spec, data)
    steps = dict.fromkeys(engine.jobs, 0)
    most = min(spec.max_steps or 0 for spec, _ in jobs)
    tokens, heard, trained, begun_s, ended_s = 0, 0, 0, None, None
    alone = dict.fromkeys(engine.jobs, (0, 0.0))
    for event in engine.events():
        if isinstance(event, JobFailed):
            raise WeftError(f"{event.job} failed: {event.reason}.", where="benchmarks methods")
        if isinstance(event, StepDone):
            steps[event.job] = event.step
            trained += event.tokens if begun_s is not None and ended_s is None else 0
            if begun_s is None and min(steps.values()) >= WARM_UP:
                begun_s = time.perf_counter()
            if ended_s is None and min(steps.values()) >= most - 1:
                ended_s = time.perf_counter()
        elif isinstance(event, MicrobatchDone) and begun_s is not None and ended_s is None:
            tokens += event.tokens
            heard += event.heard
            if len(event.jobs) == 1:
                own_tokens, own_s = alone[event.jobs[0]]
                alone[event.jobs[0]] = own_tokens + event.tokens, own_s + event.seconds
    assert begun_s is not None and ended_s is not None, "jobs have more steps than the warm-up"
    return Pace(tokens, heard, trained, ended_s - begun_s, alone, peak_gb(backbone.device))
