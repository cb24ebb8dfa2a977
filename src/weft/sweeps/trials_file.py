"""A sweep's record on disk: trials.jsonl, one line per event that must survive.

Lines are only appended, each synced before the sweep goes on, so a killed process leaves a file with all trials, their
values and their ends:

    {"kind": "trial", "name": "t003", "number": 3, "params": {...}, "total_steps": 160, "tick": 0, "at_s": 3.2}
    {"kind": "point", "name": "t003", "step": 18, "tokens": 4100, "value": 1.93, "at_s": 12.4}
    {"kind": "hold",  "name": "t003", "step": 18, "tick": 18, "at_s": 12.4}
    {"kind": "go_on", "name": "t003", "step": 18, "tick": 21, "at_s": 14.0}
    {"kind": "end",   "name": "t003", "state": "stopped", "reason": "...", "steps": 18, "tokens": 4100, "seconds": 3.1,
                      "origin": "", "started_s": 3.3, "tick": 21, "at_s": 12.5}

    {"kind": "paid",  "tick": 24, "until": 32, "spent_budget": null, "at_s": 14.0}

The tick is that of the decision (`sweeps/early_stop.py`); lines of older versions have none. What a trial did between
two points is in its own directory.
"""

from __future__ import annotations

import enum
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from weft.errors import StorageError
from weft.store import json_text
from weft.store.atomic import append_line, storage_errors, write_file


class TrialState(enum.StrEnum):
    WAITING = "waiting"
    TRAINING = "training"
    DONE = "done"
    STOPPED = "stopped"
    """Ended early because others did better; its value is the last one seen."""
    FAILED = "failed"
    """Diverged, or could not be trained; it has no value."""

    @property
    def is_final(self) -> bool:
        return self in (TrialState.DONE, TrialState.STOPPED, TrialState.FAILED)


@dataclass(frozen=True)
class Observation:
    step: int
    tokens: int
    value: float
    at_s: float
    """Seconds since the sweep began."""


@dataclass
class Trial:
    number: int
    name: str
    params: dict[str, Any]
    """Chosen values by the names of the sweep file."""
    state: TrialState = TrialState.WAITING
    reason: str = ""
    points: list[Observation] = field(default_factory=list)
    losses: list[tuple[int, float]] = field(default_factory=list)
    steps: int = 0
    total_steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    started_s: float | None = None
    """Start of training in seconds since the sweep began; None while it waits."""
    ended_s: float | None = None
    chosen_tick: int = 0
    start_tick: int = 0
    end_tick: int | None = None
    held_step: int | None = None
    origin: str = ""
    """Directory of the earlier sweep's trial that it was taken from; empty if trained here."""

    @property
    def value(self) -> float | None:
        return self.points[-1].value if self.points else None

    def see(self, point: Observation) -> None:
        """Adds a value; a trial that resumes from an earlier checkpoint repeats some."""
        others = [known for known in self.points if known.step != point.step]
        self.points = sorted([*others, point], key=lambda known: known.step)


def trial_name(number: int) -> str:
    return f"t{number:03d}"


FILE = "trials.jsonl"


class TrialsFile:
    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self.seconds = 0.0
        self.tick = 0
        self.paid_until = -1
        self.spent_budget: int | None = None
        """Budget of tokens that was used up; no trial starts within it."""

    def read(self) -> list[Trial]:
        """The recorded trials, oldest first; an incomplete last line is removed."""
        with storage_errors(self.path):
            data = self.path.read_bytes() if self.path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        if whole != data:
            write_file(self.path, whole)
        trials: dict[str, Trial] = {}
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                self._apply(json_text.parse(line), trials)
            except (ValueError, KeyError, TypeError, AttributeError):
                raise StorageError("is not a line of a sweep's record.", where=f"{self.path} line {number}") from None
        return list(trials.values())

    def add_trial(self, trial: Trial, at_s: float) -> None:
        fields = _named(trial, "name", "number", "params", "total_steps")
        self._append({"kind": "trial", **fields, "tick": trial.chosen_tick, "at_s": at_s})

    def add_point(self, trial: Trial, point: Observation) -> None:
        self._append({"kind": "point", "name": trial.name, **asdict(point)})

    def add_hold(self, trial: Trial, tick: int, at_s: float) -> None:
        self._append({"kind": "hold", "name": trial.name, "step": trial.held_step, "tick": tick, "at_s": at_s})

    def add_go_on(self, trial: Trial, step: int, tick: int, at_s: float) -> None:
        self._append({"kind": "go_on", "name": trial.name, "step": step, "tick": tick, "at_s": at_s})

    def add_paid(self, tick: int, until: int, spent_budget: int | None, at_s: float) -> None:
        """Records that a budget of tokens has paid for steps up to a tick, or is used up."""
        self._append({"kind": "paid", "tick": tick, "until": until, "spent_budget": spent_budget, "at_s": at_s})

    def add_end(self, trial: Trial, at_s: float) -> None:
        fields = _named(trial, "name", "state", "reason", "steps", "tokens", "seconds", "origin", "started_s")
        self._append({"kind": "end", **fields, "tick": trial.end_tick, "at_s": at_s})

    def _apply(self, line: Any, trials: dict[str, Trial]) -> None:
        at_s = float(line.get("at_s") or 0.0)
        self.seconds = max(self.seconds, at_s)
        tick = int(line.get("tick") or 0)
        if line["kind"] != "end" or line["state"] == TrialState.STOPPED:
            # A trial's own end is recorded as soon as it is known, and takes effect in its turn.
            self.tick = max(self.tick, tick)
        if line["kind"] == "paid":
            self.paid_until, self.spent_budget = int(line["until"]), line["spent_budget"]
            return
        name = line["name"]
        if line["kind"] == "trial":
            params, total_steps = dict(line["params"]), int(line["total_steps"])
            trials[name] = trial = Trial(int(line["number"]), name, params, total_steps=total_steps, started_s=at_s)
            trial.chosen_tick = trial.start_tick = tick
            return
        trial = trials[name]
        if line["kind"] == "point":
            trial.see(Observation(line["step"], line["tokens"], line["value"], line["at_s"]))
            trial.state = TrialState.TRAINING
        elif line["kind"] == "hold":
            trial.held_step = int(line["step"])
        elif line["kind"] == "go_on":
            trial.held_step, trial.start_tick = None, tick - int(line["step"])
        elif line["kind"] == "end":
            trial.end_tick = tick
            trial.state, trial.reason = TrialState(line["state"]), line["reason"]
            trial.steps, trial.tokens, trial.seconds = line["steps"], line["tokens"], line["seconds"]
            trial.origin, trial.started_s = line["origin"], line.get("started_s")
            trial.ended_s = None if trial.started_s is None else at_s

    def _append(self, line: dict[str, Any]) -> None:
        data = json.dumps(json_text.finite(line), allow_nan=False).encode() + b"\n"
        append_line(self.path, data, "trials.append", sync=True)


def _named(trial: Trial, *names: str) -> dict[str, Any]:
    return {name: getattr(trial, name) for name in names}
