"""The text of one sample, before it is tokenised."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rendered:
    """The text of one sample and which of its characters are trained."""

    text: str
    spans: tuple[tuple[int, int], ...]
    """Trained characters, as [start, end)."""
    is_bare: bool
    """No template made it: BOS (if the tokenizer adds one) and EOS are still to be put around it."""
    where: str
    weights: tuple[float, ...] = ()
    """What the tokens of each span count in the loss; none: all the same."""

    @property
    def weighted_spans(self) -> list[tuple[tuple[int, int], float]]:
        """The spans, each with what its tokens count."""
        return list(zip(self.spans, self.weights or [1.0] * len(self.spans), strict=True))
