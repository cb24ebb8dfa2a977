"""What devices that share every layer wait for sums, and what two passes took side by side, learnt from those that ran.

A pass that runs alone tells how much of it was waiting, which is what another beside it could hide. Once pairs have
run, what they took counts instead, against what their passes are known to take alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.plan.cost.fit import Fit, MicrobatchLoad
from weft.plan.cost.learned import FEWEST, WINDOW

Pair = tuple[MicrobatchLoad, MicrobatchLoad]
PassOf = tuple[str, int]
"""The name of a pass, and its stage."""


@dataclass(frozen=True)
class MeasuredPairs:
    """What was learnt of passes; nothing of those that have not been seen often enough."""

    sums: Mapping[PassOf, float] = field(default_factory=dict)
    """The part of a pass that is waiting for sums."""
    pairs: Mapping[PassOf, float] = field(default_factory=dict)
    """What two passes take side by side, as a part of what they take one after another."""


@dataclass
class PairPace:
    """Collects what sums and pairs take."""

    _sums: dict[PassOf, deque[tuple[float, float]]] = field(default_factory=dict)
    _pairs: dict[PassOf, deque[tuple[Pair, float]]] = field(default_factory=dict)

    def note_sums(self, name: PassOf, sums_s: float, seconds: float) -> None:
        """One pass that ran alone, and how long of that it waited."""
        self._sums.setdefault(name, deque(maxlen=WINDOW)).append((sums_s, seconds))

    def note_pair(self, name: PassOf, loads: Pair, seconds: float) -> None:
        """Two passes, from the beginning of the first to the end of the last."""
        self._pairs.setdefault(name, deque(maxlen=WINDOW)).append((loads, seconds))

    def learn(self, alone: Mapping[PassOf, Fit]) -> MeasuredPairs:
        """What is known; `alone`: what passes take by themselves, as far as that has been learnt."""
        # Copies: others go on noting meanwhile.
        waits = {name: list(seen) for name, seen in list(self._sums.items()) if len(seen) >= FEWEST}
        taken = {name: list(seen) for name, seen in list(self._pairs.items()) if len(seen) >= FEWEST and name in alone}
        sums = {
            name: sum(sums_s for sums_s, _ in seen) / sum(all_s for _, all_s in seen) for name, seen in waits.items()
        }
        pairs = {}
        for name, seen in taken.items():
            one_by_one_s = sum(alone[name].predict(load) for loads, _ in seen for load in loads)
            pairs[name] = sum(seconds for _, seconds in seen) / one_by_one_s
        return MeasuredPairs(sums, pairs)
