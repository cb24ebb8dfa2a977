"""What families multiply their logits by."""

from __future__ import annotations

from weft.plan.families.description import Config

_DIVIDED = ("granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared", "granitemoehybrid")
_MULTIPLIED = {
    "cohere": "logit_scale",
    "cohere2": "logit_scale",
    "cohere2_moe": "logit_scale",
    "cohere_compass": "logit_scale",
    "hyperclovax": "logits_scaling",
}


def logit_scale(family: str, config: Config) -> float | None:
    """The factor between the output head's product and the logits; None where there is none."""
    if family in _DIVIDED:
        return 1.0 / float(config["logits_scaling"])
    if family in _MULTIPLIED:
        return float(config[_MULTIPLIED[family]])
    return None
