"""Reads a sweep's leaderboard into plain dataclasses; missing or odd values are left out and are never an error.

A leaderboard is read most often while a sweep still runs or after a crash, so any value may be absent or not finite.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from weft.errors import counted
from weft.report import readable
from weft.report.run_data import number
from weft.store.wall_clock import TimeSplit

STATES = ("done", "training", "waiting", "stopped", "failed")


@dataclass(frozen=True, slots=True)
class BoardPoint:
    step: float
    tokens: float | None
    value: float


@dataclass(frozen=True)
class BoardTrial:
    number: int
    name: str
    state: str
    reason: str
    value: float | None
    params: Mapping[str, Any]
    steps: int
    total_steps: int
    tokens: float
    seconds: float
    points: tuple[BoardPoint, ...]
    losses: tuple[tuple[float, float], ...]
    started_s: float | None = None
    ended_s: float | None = None
    origin: str = ""

    @property
    def left_out(self) -> float:
        """Remaining training of a stopped trial over what it has trained: 3.0 after a quarter."""
        is_known = self.state == "stopped" and 0 < self.steps < self.total_steps
        return (self.total_steps - self.steps) / self.steps if is_known else 0.0


@dataclass(frozen=True)
class Board:
    """The state of a sweep; trials in order of rank, the best first."""

    metric: str
    mode: str
    sampler: str
    trials: tuple[BoardTrial, ...]
    seconds: float | None
    tokens: float
    one_by_one_seconds: float | None
    scales: Mapping[str, str]
    """`log` or `linear` for every parameter that the sweep searches over a range."""
    time: TimeSplit | None = None
    num_packs: int = 0
    predicted_s: tuple[float, ...] = ()
    """The sweep's seconds as predicted after its first steps, and after each early stop."""

    @property
    def packs_in_words(self) -> str:
        """Predicted against measured time; empty if nothing was predicted."""
        if not self.predicted_s or self.seconds is None:
            return ""
        first, last = self.predicted_s[0], self.predicted_s[-1]
        after = f", {readable.duration(last)} after the last early stop" if len(self.predicted_s) > 1 else ""
        return (
            f"{counted(self.num_packs, 'pack')}: {readable.duration(first)} predicted from the first steps{after}; "
            f"{readable.duration(self.seconds)} measured"
        )

    @property
    def best(self) -> BoardTrial | None:
        return next((trial for trial in self.trials if trial.value is not None and trial.state != "failed"), None)

    @property
    def speed_up(self) -> float | None:
        if not self.seconds or self.one_by_one_seconds is None:
            return None
        return self.one_by_one_seconds / self.seconds

    def in_state(self, state: str) -> list[BoardTrial]:
        return [trial for trial in self.trials if trial.state == state]

    @property
    def new_trials(self) -> list[BoardTrial]:
        return [trial for trial in self.trials if not trial.origin]

    def counts(self) -> dict[str, int]:
        others = sorted({trial.state for trial in self.trials} - set(STATES))
        counted = {state: len(self.in_state(state)) for state in (*STATES, *others)}
        return {state: num for state, num in counted.items() if num}


def read_board(board: Mapping[str, Any]) -> Board:
    rows = [row for row in board.get("trials") or () if isinstance(row, Mapping)]
    numbered = [(_rank(row), _trial(row, index)) for index, row in enumerate(rows)]
    numbered.sort(key=lambda pair: (pair[0], pair[1].number))
    trials = tuple(trial for _, trial in numbered)
    tokens, scales = number(board.get("tokens")), board.get("scales")
    return Board(
        metric=str(board.get("metric") or "objective"),
        mode="max" if board.get("mode") == "max" else "min",
        sampler=str(board.get("sampler") or ""),
        trials=trials,
        seconds=number(board.get("seconds")),
        tokens=sum(trial.tokens for trial in trials if not trial.origin) if tokens is None else tokens,
        one_by_one_seconds=number(board.get("one_by_one_seconds")),
        scales=dict(scales) if isinstance(scales, Mapping) else {},
        time=TimeSplit.from_json(board.get("time")),
        num_packs=int(number(board.get("num_packs")) or 0),
        predicted_s=tuple(end for _, end in _losses(board.get("predicted_ends") or ())),
    )


def _rank(row: Mapping[str, Any]) -> float:
    rank = number(row.get("rank"))
    return math.inf if rank is None else rank


def _trial(row: Mapping[str, Any], index: int) -> BoardTrial:
    index = int(number(row.get("number")) or 0) if "number" in row else index
    params = row.get("params")
    return BoardTrial(
        number=index,
        name=str(row.get("name") or f"trial {index}"),
        state=str(row.get("state") or "waiting"),
        reason=str(row.get("reason") or ""),
        value=number(row.get("value")),
        params=dict(params) if isinstance(params, Mapping) else {},
        steps=int(number(row.get("steps")) or 0),
        total_steps=int(number(row.get("total_steps")) or 0),
        tokens=number(row.get("tokens")) or 0.0,
        seconds=number(row.get("seconds")) or 0.0,
        points=tuple(_points(row.get("points") or ())),
        losses=tuple(_losses(row.get("losses") or ())),
        started_s=number(row.get("started_s")),
        ended_s=number(row.get("ended_s")),
        origin=str(row.get("origin") or ""),
    )


def _points(rows: Iterable[Any]) -> Iterable[BoardPoint]:
    for row in rows:
        step, value = (number(row.get(key)) for key in ("step", "value")) if isinstance(row, Mapping) else (None, None)
        if step is not None and value is not None:
            yield BoardPoint(step, number(row.get("tokens")), value)


def _losses(rows: Iterable[Any]) -> Iterable[tuple[float, float]]:
    for row in rows:
        step, loss = map(number, row) if isinstance(row, list | tuple) and len(row) == 2 else (None, None)
        if step is not None and loss is not None:
            yield step, loss
