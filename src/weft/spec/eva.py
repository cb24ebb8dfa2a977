"""How an adapter that starts by EVA looks at its job's data."""

from __future__ import annotations

from dataclasses import dataclass

from weft.spec.fields import KnownKeywords, above, setting, validate


@dataclass(frozen=True)
class EvaSpec(KnownKeywords):
    """The settings of `eva_config`; the names are PEFT's."""

    tau: float = setting(0.99, rule=above(0, 1))
    """A module has seen enough once each of its directions has at least this cosine to what it was one pass before."""
    use_label_mask: bool = setting(True)
    """Whether only tokens that count in the loss are looked at; false: all of them."""

    def __post_init__(self) -> None:
        validate(self)
