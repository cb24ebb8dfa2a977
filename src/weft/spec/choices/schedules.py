"""The shapes that a job's learning rate can have over its steps, and the settings of those that have some.

Names, settings and formulas are those of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from weft.errors import ConfigError, closest

DECAYS = ("cosine", "linear", "1-sqrt")
SCHEDULES = (
    *("linear", "cosine", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt"),
    *("cosine_with_restarts", "cosine_with_min_lr", "warmup_stable_decay"),
)
ScheduleSettings = Mapping[str, float | str]
Accepted = tuple[str, Callable[[Any], bool]]
"""What a setting must be, in words and as a test."""

_COUNT: Accepted = ("a whole number of at least 1", lambda v: _is_number(v) and v >= 1 and float(v).is_integer())
_SHARE: Accepted = ("at least 0 and at most 1", lambda v: _is_number(v) and 0 <= v <= 1)
_STEPS: Accepted = ("a count of steps, or below 1 a fraction of all", lambda v: _is_number(v) and v >= 0)
SCHEDULE_SETTINGS: Mapping[str, Mapping[str, Accepted]] = {
    "cosine_with_restarts": {"num_cycles": _COUNT},
    "cosine_with_min_lr": {"min_lr": ("at least 0", lambda v: _is_number(v) and v >= 0), "min_lr_rate": _SHARE},
    "warmup_stable_decay": {
        "num_decay_steps": _STEPS,
        "num_stable_steps": _STEPS,
        "decay_type": (f"one of {', '.join(DECAYS)}", lambda v: v in DECAYS),
        "min_lr_ratio": _SHARE,
    },
}
"""By schedule, what `lr_scheduler_kwargs` may hold."""


def check_schedule(kind: str, given: ScheduleSettings) -> None:
    """ConfigError if a schedule has not these settings, or needs others."""
    accepted = SCHEDULE_SETTINGS.get(kind, {})
    for name, value in given.items():
        where = f"lr_scheduler_kwargs.{name}"
        if name not in accepted:
            has = f"has {', '.join(accepted)}" if accepted else "has none"
            guess = closest(name, list(accepted))
            hint = f"Did you mean {guess}?" if guess else None
            raise ConfigError(f"is no setting of lr_scheduler_type {kind}, which {has}.", where=where, hint=hint)
        words, is_fine = accepted[name]
        if not is_fine(value):
            raise ConfigError(f"must be {words}, got {value!r}.", where=where)
    if kind == "cosine_with_min_lr" and len(given) != 1:
        raise ConfigError("cosine_with_min_lr needs either min_lr or min_lr_rate.", where="lr_scheduler_kwargs")
    if kind == "warmup_stable_decay" and "num_decay_steps" not in given:
        raise ConfigError("warmup_stable_decay needs num_decay_steps.", where="lr_scheduler_kwargs")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)
