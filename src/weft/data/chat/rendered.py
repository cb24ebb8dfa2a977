"""The text of one sample, before it is tokenised."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rendered:
    """The text of one sample and its trained characters."""

    text: str
    spans: tuple[tuple[int, int], ...]
    """Trained characters, as [start, end)."""
    is_bare: bool
    """True if no template made it: BOS (if the tokenizer adds one) and EOS are still to be added."""
    where: str
    weights: tuple[float, ...] = ()
    """Weight of the tokens of each span in the loss; empty if all are 1."""

    @property
    def weighted_spans(self) -> list[tuple[tuple[int, int], float]]:
        return list(zip(self.spans, self.weights or [1.0] * len(self.spans), strict=True))
