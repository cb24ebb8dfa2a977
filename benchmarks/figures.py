"""A figure: one measured number with its target, and how people read it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass


class Kind(enum.StrEnum):
    """A figure in one line of text."""

    SPEEDUP = "speedup"
    """Tokens per second over the peer's; more is better."""
    OVERHEAD = "overhead"
    """Time per token over the peer's, less one; less is better."""
    TIME_RATIO = "time ratio"
    """Time over the frozen product's; less is better."""
    PEAK_GB = "peak GB"
    """Peak memory in 10⁹ bytes; less is better."""
    DIFFERENCES = "differences"
    """Numbers that are not equal to the bit; less is better."""
    COUNT = "count"
    """Less is better."""
    TOKENS_PER_S = "tokens/s"
    """Tokens per second; more is better."""
    GB_PER_S = "GB/s"
    """10⁹ bytes a second; more is better."""
    SECONDS = "seconds"
    """Less is better."""
    MILLISECONDS = "milliseconds"
    """Less is better."""
    MICROSECONDS = "microseconds"
    """Less is better."""
    WASTE = "waste"
    """A share of something that should not be; less is better."""
    ERROR = "relative error"
    """Less is better."""
    SHARE = "share"
    """A share of something that should be; more is better."""

    @property
    def less_is_better(self) -> bool:
        """The target is an upper bound."""
        return self not in (Kind.SPEEDUP, Kind.TOKENS_PER_S, Kind.GB_PER_S, Kind.SHARE)

    def shown(self, value: float) -> str:
        """A value as people read it."""
        return {
            Kind.SPEEDUP: f"{value:.2f}x",
            Kind.OVERHEAD: f"{value:+.1%}",
            Kind.TIME_RATIO: f"{value:.3f}",
            Kind.PEAK_GB: f"{value:.1f} GB",
            Kind.DIFFERENCES: f"{value:,.0f} differ",
            Kind.COUNT: f"{value:,.0f}",
            Kind.TOKENS_PER_S: f"{value:,.0f} tokens/s",
            Kind.GB_PER_S: f"{value:.1f} GB/s",
            Kind.SECONDS: f"{value:.2f} s",
            Kind.MILLISECONDS: f"{value:.1f} ms",
            Kind.MICROSECONDS: f"{value:.0f} µs",
            Kind.WASTE: f"{value:.2%}",
            Kind.ERROR: f"{value:.1e}",
            Kind.SHARE: f"{value:.2%}",
        }[self]


Targets = Mapping[str, tuple[Kind, float | None]]
"""Of a benchmark made of parts: what is shown of its values, by key; the others go into the JSON file alone."""
Parts = Mapping[str, Callable[[], dict[str, float]]]
"""What measures the values, by name."""


@dataclass(frozen=True)
class Figure:
    """One measured number."""

    key: str
    value: float
    kind: Kind
    target: float | None = None
    tokens_per_s: float | None = None
    """The speed that it is computed from."""
    peer_tokens_per_s: float | None = None
    detail: str = ""
    """What is worth knowing beside it."""

    @property
    def is_met(self) -> bool | None:
        """Whether the target is reached; None without one."""
        if self.target is None:
            return None
        return self.value <= self.target if self.kind.less_is_better else self.value >= self.target

    @property
    def shown(self) -> str:
        """The value as people read it."""
        return self.kind.shown(self.value)

    @property
    def shown_target(self) -> str:
        """The target as people read it; empty without one."""
        if self.target is None:
            return ""
        return f"{'≤' if self.kind.less_is_better else '≥'} {self.kind.shown(self.target)}"

    @property
    def line(self) -> str:
        """All of it in one line."""
        note = {True: ", met", False: ", NOT met", None: ""}[self.is_met]
        target = f" (target {self.shown_target}{note})" if self.target is not None else ""
        detail = f"; {self.detail}" if self.detail else ""
        return f"{self.key} = {self.shown}{target}{detail}"


def measure_parts(parts: Parts, targets: Targets) -> Iterator[tuple[str, dict[str, float], list[Figure]]]:
    """Part by part: its name, all its values, and those with a place in the table."""
    for name, measure in parts.items():
        values = measure()
        yield name, values, [Figure(key, values[key], *targets[key]) for key in targets if key in values]
