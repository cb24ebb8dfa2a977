"""Which capacity and layout are fastest here: a handful of trials, each measured once and remembered by its content.

First every capacity on one device, then the other layouts with the two that were fastest: eight trials or so where a
grid would have twice as many. What a run says now is always among them. Where several are about as fast, the one that
changes least is recommended.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.bench.trials.trial import ONE_DEVICE, Trial, TrialResult
from weft.spec import RunSpec
from weft.store.atomic import write_file
from weft.store.json_text import dump

WORTH = 0.03
"""Part of the speed by which a change must be faster to be recommended."""
MOST_REMEMBERED = 500
Measure = Callable[[Trial], TrialResult]


@dataclass(frozen=True)
class Found:
    """All trials, the first being what the run says now."""

    results: tuple[TrialResult, ...]

    @property
    def now(self) -> TrialResult:
        """As the run is."""
        return self.results[0]

    @property
    def best(self) -> TrialResult:
        """Of all that are about as fast as the fastest, the one that changes least."""
        least = max(result.tokens_per_s for result in self.results) / (1 + WORTH)
        now, close = self.now.trial, [result for result in self.results if result.tokens_per_s >= least]
        return min(close, key=lambda r: (r.trial.layout != now.layout, r.trial.capacity != now.capacity))


def capacities_around(now: int, longest: int) -> list[int]:
    """What a run has now, then a quarter, half and twice of it, as far as a sample fits."""
    return [now, *(other for other in (now // 4, now // 2, 2 * now) if other >= max(longest, 2))]


def search(now: Trial, capacities: Sequence[int], layouts: Sequence[str], measure: Measure) -> Found:
    """Measures what the run says now, and what may be faster."""
    found = {now: measure(now)}

    def try_all(trials: Sequence[Trial]) -> None:
        for trial in trials:
            if trial not in found:
                found[trial] = measure(trial)

    try_all([Trial(capacity, now.layout) for capacity in capacities])
    fastest = sorted(found.values(), key=lambda result: -result.tokens_per_s)[:2]
    others = [layout for layout in layouts if layout != now.layout]
    try_all([Trial(result.trial.capacity, layout) for layout in others for result in fastest])
    return Found(tuple(found.values()))


@dataclass
class RememberedTrials:
    """Results of trials in a file, by what they were measured on: the run, its data, the device and the software."""

    path: Path
    facts: Any
    """All that a result depends on besides the trial, as JSON takes it."""

    def key(self, trial: Trial) -> str:
        """Of a trial under these facts."""
        text = json.dumps([self.facts, dataclasses.asdict(trial)], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    def get(self, trial: Trial) -> TrialResult | None:
        """What was measured before; a file or an entry that is damaged counts as nothing."""
        try:
            return TrialResult(**{**self._read()[self.key(trial)], "trial": trial})
        except (KeyError, TypeError):
            return None

    def put(self, result: TrialResult) -> None:
        """Remembers a result; one of which nothing was measured is tried again next time."""
        if result.problem is None:
            entry = {name: value for name, value in dataclasses.asdict(result).items() if name != "trial"}
            known = {**self._read(), self.key(result.trial): entry}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_file(self.path, dump(dict(list(known.items())[-MOST_REMEMBERED:])))

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def run_facts(spec: RunSpec, lengths: Mapping[str, Sequence[int]], num_steps: int, device: str) -> list[Any]:
    """What trials of a run depend on: its settings but for where it goes, the lengths of its samples, the device."""
    import torch

    import weft

    settings = dataclasses.asdict(spec)
    for name in ("output_dir", "run_name", "report_to", "capacity"):
        settings.pop(name, None)
    digests = {job: hashlib.sha256(str(list(own)).encode()).hexdigest() for job, own in lengths.items()}
    return [settings, digests, num_steps, device, weft.__version__, torch.__version__]


def shown_layout(layout: str) -> str:
    """What to add to a command for a layout."""
    return "" if layout == ONE_DEVICE else f" --layout {layout}"
