"""A sweep's own memory on disk: trials.jsonl, one line for everything that must not be forgotten.

Lines are only ever added, each synced before the sweep goes on, so whatever kills the process leaves a file that says
which trials exist, what was seen of them and how they ended:

    {"kind": "trial", "name": "t003", "number": 3, "params": {...}, "total_steps": 160, "at_s": 3.2}
    {"kind": "point", "name": "t003", "step": 18, "tokens": 4100, "value": 1.93, "at_s": 12.4}
    {"kind": "end",   "name": "t003", "state": "stopped", "reason": "...", "steps": 18, "tokens": 4100, "seconds": 3.1,
                      "origin": "", "started_s": 3.3, "at_s": 12.5}

What a trial did between two points is in its own directory.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from weft.errors import StorageError
from weft.store import json_text
from weft.store.atomic import append_line, storage_errors, write_file
from weft.sweeps.record.trial import Observation, Trial, TrialState

FILE = "trials.jsonl"


class TrialsFile:
    """An open trials.jsonl."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self.seconds = 0.0
        """What the sweep had taken when its last line was written."""

    def read(self) -> list[Trial]:
        """The trials as recorded, oldest first; what a crash left of a last line is taken off."""
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
        """A configuration has been chosen."""
        self._append({"kind": "trial", **_named(trial, "name", "number", "params", "total_steps"), "at_s": at_s})

    def add_point(self, trial: Trial, place: int) -> None:
        """The objective of a trial was seen: one of its points, by place."""
        self._append({"kind": "point", "name": trial.name, **asdict(trial.points[place])})

    def add_end(self, trial: Trial, at_s: float) -> None:
        """A trial has come to its end."""
        told = _named(trial, "name", "state", "reason", "steps", "tokens", "seconds", "origin", "started_s")
        self._append({"kind": "end", **told, "at_s": at_s})

    def _apply(self, line: Any, trials: dict[str, Trial]) -> None:
        name, at_s = line["name"], float(line.get("at_s") or 0.0)
        self.seconds = max(self.seconds, at_s)
        if line["kind"] == "trial":
            params, total_steps = dict(line["params"]), int(line["total_steps"])
            trials[name] = Trial(int(line["number"]), name, params, total_steps=total_steps, started_s=at_s)
            return
        trial = trials[name]
        if line["kind"] == "point":
            # A trial that went on from an earlier checkpoint sees the same again.
            trial.points = [point for point in trial.points if point.step < line["step"]]
            trial.points.append(Observation(line["step"], line["tokens"], line["value"], line["at_s"]))
            trial.state = TrialState.TRAINING
        elif line["kind"] == "end":
            trial.state, trial.reason = TrialState(line["state"]), line["reason"]
            trial.steps, trial.tokens, trial.seconds = line["steps"], line["tokens"], line["seconds"]
            trial.origin, trial.started_s = line["origin"], line.get("started_s")
            trial.ended_s = None if trial.started_s is None else at_s

    def _append(self, line: dict[str, Any]) -> None:
        data = json.dumps(json_text.finite(line), allow_nan=False).encode() + b"\n"
        append_line(self.path, data, "trials.append", sync=True)


def _named(trial: Trial, *names: str) -> dict[str, Any]:
    return {name: getattr(trial, name) for name in names}
