"""Where the wall clock went: every moment counts once, for the foremost thing that went on in it.

What a run does overlaps: files are written and data is prepared beside computing. A moment in which anything was
computed counts as computing, whatever else went on; a moment in which files were written and nothing else happened
counts as writing, because training waited for the disk. So the parts add up to the wall clock, exactly.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

MOST_SPELLS = 512
"""Number of spells kept separately. Beyond it the older half is summed up, so that memory stays bounded."""


class Activity(StrEnum):
    COMPUTING = "computing"
    """Microbatches and optimizer steps; in a service also answers to prompts."""
    EVALUATING = "evaluating"
    COMPILING = "compiling"
    """Waiting for kernels or for graph capture; compilation during loading does not count."""
    LOADING = "loading"
    """Python and its libraries, the model, checkpoints to resume from, a move to other replicas."""
    PREPARING = "preparing data"
    """Reading and tokenising data, packing microbatches."""
    WRITING = "writing"
    """Metrics, checkpoints, adapters, the report."""
    IDLE = "idle"
    """All the rest: planning, bookkeeping, waiting for work."""

    @property
    def key(self) -> str:
        return f"{self.value.replace(' ', '_')}_s"


Spell = tuple[Activity, int, int]
"""An activity from one moment to another, in nanoseconds."""


def partition(spells: Iterable[Spell], start: int, end: int) -> dict[Activity, int]:
    """The nanoseconds from `start` to `end` by activity; the order of the spells does not matter."""
    order = list(Activity)
    changes: list[tuple[int, int, int]] = []
    for activity, begun, ended in spells:
        begun, ended = max(begun, start), min(ended, end)
        if begun < ended:
            index = order.index(activity)
            changes += [(begun, index, 1), (ended, index, -1)]
    spent, under_way, moment = dict.fromkeys(order, 0), [0] * len(order), start
    for at, index, change in [*sorted(changes), (end, 0, 0)]:
        foremost = next((activity for activity, num in zip(order, under_way, strict=True) if num), Activity.IDLE)
        spent[foremost] += at - moment
        under_way[index] += change
        moment = at
    return spent


@dataclass(frozen=True)
class TimeSplit:
    spent_ns: Mapping[Activity, int]

    @property
    def wall_s(self) -> float:
        return sum(self.spent_ns.values()) / 1e9

    def seconds(self, activity: Activity) -> float:
        return self.spent_ns.get(activity, 0) / 1e9

    def __add__(self, other: TimeSplit) -> TimeSplit:
        """The sum, such as of two sessions of one run."""
        spent = {activity: self.spent_ns.get(activity, 0) + other.spent_ns.get(activity, 0) for activity in Activity}
        return TimeSplit(spent)

    def to_json(self) -> dict[str, float]:
        """Seconds to the millisecond by name; `wall_s` is the sum of the others."""
        ms = {activity.key: round(self.spent_ns.get(activity, 0) / 1e6) for activity in Activity}
        return {"wall_s": sum(ms.values()) / 1e3, **{key: value / 1e3 for key, value in ms.items()}}

    @classmethod
    def from_json(cls, value: Any) -> TimeSplit | None:
        """The inverse of `to_json`; None for other values."""
        if not isinstance(value, Mapping):
            return None
        seconds = {activity: value.get(activity.key) for activity in Activity}
        known = {activity: s for activity, s in seconds.items() if isinstance(s, int | float) and 0 <= s < math.inf}
        return cls({a: round(s * 1e9) for a, s in known.items()}) if len(known) == len(seconds) else None


class WallClock:
    """The wall clock of a process that works on a run; threads may share it."""

    def __init__(self, start_s: float | None = None, *, before: TimeSplit | None = None) -> None:
        """Starts at a moment of `time.perf_counter`, or now; `before`: the time that the command had taken by then."""
        self._before = before
        self._earlier: TimeSplit | None = None
        """Time of the run in earlier commands; None if unknown."""
        self._start = time.perf_counter_ns() if start_s is None else _ns(start_s)
        self._added_until = self._start
        self._added = TimeSplit(dict.fromkeys(Activity, 0))
        """Summed time up to `_added_until`; spells that are added later count only from there."""
        self._spells: list[Spell] = []
        self._under_way: list[tuple[Activity, int]] = []
        self._end: int | None = None
        """Time of `stop`; None while running."""
        self._lock = threading.Lock()

    @contextmanager
    def spending(self, activity: Activity) -> Iterator[None]:
        """Counts the time of its body, however that ends."""
        begun = time.perf_counter_ns()
        with self._lock:
            self._under_way.append((activity, begun))
        try:
            yield
        finally:
            with self._lock:
                self._under_way.remove((activity, begun))
            self._add((activity, begun, time.perf_counter_ns()))

    def add(self, activity: Activity, seconds: float, ended_s: float) -> None:
        self._add((activity, _ns(ended_s - seconds), _ns(ended_s)))

    def add_start(self, activity: Activity) -> None:
        """Counts all the time until now."""
        self._add((activity, self._start, time.perf_counter_ns()))

    def stop(self) -> None:
        """Stops counting, so that all readers get the same time; further calls do nothing."""
        with self._lock:
            if self._end is None:
                self._end = time.perf_counter_ns()
                self._spells += [(activity, begun, self._end) for activity, begun in self._under_way]

    def again(self) -> WallClock:
        """The clock of another try of the same command, which begins now."""
        later = WallClock(before=self.since_command())
        later._earlier = self._earlier
        return later

    def go_on_from(self, earlier: TimeSplit | None) -> None:
        """Sets the run's time in earlier commands; only the first call counts, since the file grows later."""
        if self._earlier is None:
            self._earlier = earlier or TimeSplit({})

    def split(self) -> TimeSplit:
        """The time up to now or `stop`, to the millisecond as it is stored, so that all readers round alike."""
        with self._lock:
            now = time.perf_counter_ns() if self._end is None else self._end
            spells = [*self._spells, *((activity, begun, now) for activity, begun in self._under_way)]
            split = self._added + TimeSplit(partition(spells, self._added_until, now))
        return TimeSplit({activity: round(spent_ns, -6) for activity, spent_ns in split.spent_ns.items()})

    def since_command(self) -> TimeSplit:
        """The same from the start of the command, which may have restarted itself."""
        return self.split() if self._before is None else self._before + self.split()

    def of_run(self) -> TimeSplit:
        """The same including earlier commands of the run."""
        return self.since_command() if self._earlier is None else self._earlier + self.since_command()

    def _add(self, spell: Spell) -> None:
        with self._lock:
            if self._end is not None:
                return
            self._spells.append(spell)
            if len(self._spells) > MOST_SPELLS:
                # The time to the end of the older half is summed up.
                until = max(sorted(ended for *_, ended in self._spells)[MOST_SPELLS // 2], self._added_until)
                self._added += TimeSplit(partition(self._spells, self._added_until, until))
                self._added_until = until
                self._spells = [spell for spell in self._spells if spell[2] > until]


def process_start_s() -> float:
    """Start of this process by `time.perf_counter`; now, if the system does not report it."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        age_s = 0.0
    return time.perf_counter() - max(age_s, 0.0)


def _ns(seconds: float) -> int:
    return round(1e9 * seconds)
