"""Learning-rate schedules as pure functions of the step; the names and formulas are those of transformers."""

from __future__ import annotations

import math

_POLYNOMIAL_END = 1e-7


def warmup_steps(setting: float, num_steps: int) -> int:
    """Warm-up in steps, from a count or (below 1) a fraction of all steps."""
    return math.ceil(num_steps * setting) if setting < 1 else int(setting)


def learning_rate(kind: str, peak: float, step: int, num_steps: int, warmup: int) -> float:
    """The learning rate of the step-th step (from 0) of num_steps."""
    if kind == "constant":
        return peak
    if step < warmup:
        return peak * step / max(1, warmup)
    progress = (step - warmup) / max(1, num_steps - warmup)
    if kind == "constant_with_warmup":
        return peak
    if kind == "linear":
        return peak * max(0.0, 1.0 - progress)
    if kind == "cosine":
        return peak * max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))
    if kind == "polynomial":
        return (peak - _POLYNOMIAL_END) * (1.0 - progress) + _POLYNOMIAL_END if progress < 1 else _POLYNOMIAL_END
    assert kind == "inverse_sqrt", kind
    timescale = warmup or 10_000
    return peak / math.sqrt((step + timescale - warmup) / timescale)
