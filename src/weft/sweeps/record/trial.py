"""One configuration of a sweep and what became of it; everything a leaderboard or a report shows is here."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any


class TrialState(enum.StrEnum):
    """Where a trial stands."""

    WAITING = "waiting"
    TRAINING = "training"
    DONE = "done"
    """Trained to its end."""
    STOPPED = "stopped"
    """Ended early because others did better; its value is the last one seen."""
    FAILED = "failed"
    """Diverged, or could not be trained; it has no value."""

    @property
    def is_final(self) -> bool:
        """Nothing more will happen to it."""
        return self in (TrialState.DONE, TrialState.STOPPED, TrialState.FAILED)


@dataclass(frozen=True)
class Observation:
    """The objective as seen once."""

    step: int
    tokens: int
    """Trained by this trial until then."""
    value: float
    at_s: float
    """Since the sweep began."""


@dataclass
class Trial:
    """One configuration of a sweep."""

    number: int
    name: str
    """Also its job's name and its directory."""
    params: dict[str, Any]
    """What the search space chose, by the names of the sweep file."""
    state: TrialState = TrialState.WAITING
    reason: str = ""
    """Why it stopped or failed, in one sentence."""
    points: list[Observation] = field(default_factory=list)
    losses: list[tuple[int, float]] = field(default_factory=list)
    """Training loss by step."""
    steps: int = 0
    total_steps: int = 0
    """If it were trained to its end."""
    tokens: int = 0
    """Trained."""
    seconds: float = 0.0
    """Its share of the time of the microbatches it was in."""
    started_s: float | None = None
    """When it began to train, since the sweep began; None while it waits."""
    ended_s: float | None = None
    """When it came to its end."""
    asked_tick: int = 0
    """The sweep's tick at which it was chosen."""
    start_tick: int = 0
    """The sweep's tick at which it stood at step 0, had it never waited; see `sweeps/decide/ticks.py`."""
    end_tick: int | None = None
    """The tick at which it came to its end; None while it has none."""
    held_step: int | None = None
    """The step at which it waits for others to come as far; None while it goes on."""
    origin: str = ""
    """The directory of the earlier sweep's trial that it was taken from; empty if it is trained here."""

    @property
    def value(self) -> float | None:
        """The objective, as last seen."""
        return self.points[-1].value if self.points else None

    def see(self, point: Observation) -> None:
        """Adds what was seen; a trial that goes on from an earlier checkpoint sees the same again."""
        others = [known for known in self.points if known.step != point.step]
        self.points = sorted([*others, point], key=lambda known: known.step)


def trial_name(number: int) -> str:
    """What the n-th trial is called."""
    return f"t{number:03d}"
