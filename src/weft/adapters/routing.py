"""The routing table: which rows of the current microbatch belong to whom.

One `Routing` object is shared by every module of a backbone and rewritten before each microbatch; modules read it, so
jobs come and go by changing this table and the slots, never the model.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows [start, end) of a microbatch: one segment."""

    start: int
    end: int
    slot: int | None
    """The slot whose adapter applies to them; None: the bare backbone."""
    dropout_key: int | None = None
    """Key of this sample in this step; None turns dropout off (evaluation, generation)."""


@dataclass
class Routing:
    """The rows of the current microbatch, in order; rows beyond the last segment are padding."""

    segments: tuple[Rows, ...] = ()
    row_tile: int | None = None
    """Frozen products are computed in blocks of this many rows: at a fixed row count a row's result does not depend on
    its neighbours. None: all rows at once."""
    caches: list[dict[int, object]] = field(default_factory=list)
    """While generating: per segment, what attention keeps of earlier tokens, by layer; empty while training."""
