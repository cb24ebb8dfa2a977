"""How an adapter that starts by EVA looks at its job's data."""

from __future__ import annotations

from dataclasses import dataclass

from weft.spec.fields import KnownKeywords, above, setting, validate


@dataclass(frozen=True)
class EvaSpec(KnownKeywords):
    """The settings of `eva_config`; the names are PEFT's."""

    tau: float = setting(0.99, rule=above(0, 1))
    """Cosine to the pass before that every direction of a module must reach; then the module has seen enough."""
    use_label_mask: bool = setting(True)
    """Read only tokens that count in the loss; false: all."""

    def __post_init__(self) -> None:
        validate(self)
