"""Which captured graph serves a microbatch, and when another one is captured.

A graph also serves smaller microbatches, narrower adapters and fewer samples than it was captured for: rows that are
nobody's cost time and change no result. A capture costs time too. So evaluations and the microbatches at the end of a
run take the graph that is there, until what it wasted on their kind would have paid for one of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from weft.kernels.lora.tables import Needs
from weft.model.fused.graph import Captured
from weft.model.fused.inputs import InputShape

MAX_GRAPHS = 16
"""Graphs kept; they share their memory, so each costs little beyond the time to capture it."""
CAPTURE_COST = 4
"""A capture takes about as long as so many of the microbatches it is for."""
OVERHEAD = 32
"""One part in so many of a graph's rows is counted as wasted where only its kernels are wider than they need be."""


@dataclass(frozen=True)
class GraphKey:
    """What a graph is captured for."""

    shape: InputShape
    row_tile: int | None
    needs: Needs | None
    """Of the adapters that take part; None where none does."""
    version: int
    """Of the slots' table."""

    def serves(self, wanted: GraphKey) -> bool:
        """Whether its graph computes the same for a microbatch that another one would be captured for."""
        own, other = self.shape, wanted.shape
        return (
            (self.row_tile, self.version) == (wanted.row_tile, wanted.version)
            and own.num_rows >= other.num_rows
            and own.num_spans >= other.num_spans
            and own.longest >= other.longest
            and self._is_wide_enough(wanted.needs)
        )

    def _is_wide_enough(self, wanted: Needs | None) -> bool:
        if wanted is None:
            return True
        own = self.needs
        # Dropout applies to all rows of a graph or to none, and a row is rounded by its own class of ranks.
        return (
            own is not None
            and own.drops == wanted.drops
            and own.rank_class >= wanted.rank_class
            and set(own.classes) >= set(wanted.classes)
            and set(own.others) >= set(wanted.others)
        )


class CapturedGraphs:
    """The graphs of a path; those used longest ago go first."""

    def __init__(self, capture: Callable[[GraphKey], Captured], settle: Callable[[], None]) -> None:
        """`settle` waits for the device, which may be running a graph that is to go."""
        self._capture = capture
        self._settle = settle
        self._graphs: dict[GraphKey, Captured] = {}
        self._wasted: Counter[GraphKey] = Counter()
        """Rows computed in vain, by what would have been the right graph."""

    def graph(self, wanted: GraphKey) -> Captured:
        """The graph that runs a microbatch."""
        key = self._choose(wanted)
        if key not in self._graphs:
            if any(known.version != wanted.version for known in self._graphs):
                self.forget()
            self._let_go(len(self._graphs) + 1 - MAX_GRAPHS)
            self._graphs[key] = self._capture(key)
        self._graphs[key] = self._graphs.pop(key)  # the last used goes last
        return self._graphs[key]

    def forget(self) -> None:
        """Gives all of them back."""
        self._let_go(len(self._graphs))
        self._wasted.clear()

    def _choose(self, wanted: GraphKey) -> GraphKey:
        """A captured one that wastes least, or the wanted one itself if that is there or worth its capture."""
        fit = [key for key in self._graphs if key.serves(wanted)]
        if wanted in self._graphs or not fit:
            return wanted
        # The first of equals, whichever order they were used in.
        found = min(fit, key=lambda key: (key.shape.num_rows, key.shape.num_spans, key.shape.longest, str(key.needs)))
        rows = found.shape.num_rows
        self._wasted[wanted] += rows - wanted.shape.num_rows + rows // OVERHEAD
        return wanted if self._wasted[wanted] > CAPTURE_COST * rows else found

    def _let_go(self, number: int) -> None:
        if number > 0:
            self._settle()
        for key in list(self._graphs)[: max(0, number)]:
            del self._graphs[key]
