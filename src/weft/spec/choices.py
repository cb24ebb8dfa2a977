"""What jobs can choose from, with the names and rules that people know from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from weft.errors import ConfigError, did_you_mean
from weft.methods.config import MethodConfig
from weft.methods.configs import CONFIGS

BASE_BETA = 0.1


def resolve(hyperparameters: Mapping[str, Any], num_samples: int) -> dict[str, Any]:
    """Returns n_epochs, batch_size, learning_rate_multiplier and, if it is given, beta as numbers."""
    auto = {
        "n_epochs": 3 if num_samples < 1_000 else 2 if num_samples < 10_000 else 1,
        "batch_size": min(8, max(1, num_samples // 8)) if num_samples < 10_000 else 16,
        "learning_rate_multiplier": 1.0,
        **({"beta": BASE_BETA} if "beta" in hyperparameters else {}),
    }
    given = {name: value for name, value in hyperparameters.items() if value not in (None, "auto")}
    return auto | given


def training_settings(resolved: Mapping[str, Any], adapter: Any = None) -> dict[str, Any]:
    """The settings of a jobs file for numeric hyper-parameters and the `adapter`, if it is given."""
    method = adapter.get("method") if isinstance(adapter, Mapping) else None
    config = CONFIGS.get(method) if isinstance(method, str) else None
    base_rate = (config or MethodConfig).learning_rate
    return {
        "num_train_epochs": resolved["n_epochs"],
        "global_batch_size": resolved["batch_size"],
        "learning_rate": base_rate * resolved["learning_rate_multiplier"],
        **({"beta": resolved["beta"]} if "beta" in resolved else {}),
    }


OPTIMIZERS = ("adamw", "adamw_8bit", "sgd", "lion", "adafactor", "muon")
OPTIMIZER_NAMES = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "paged_adamw_32bit"), "adamw"),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_torch_8bit", "paged_adamw_8bit"), "adamw_8bit"),
    **dict.fromkeys(("lion_32bit", "lion_pytorch", "paged_lion_32bit"), "lion"),
}
"""Names of transformers' TrainingArguments and of trainers that build on it."""


DECAYS = ("cosine", "linear", "1-sqrt")
SCHEDULES = (
    *("linear", "cosine", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt"),
    *("cosine_with_restarts", "cosine_with_min_lr", "warmup_stable_decay"),
)
ScheduleSettings = Mapping[str, float | str]
Accepted = tuple[str, Callable[[Any], bool]]
"""A condition on a value, in words and as a test."""

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


def check_schedule(kind: str, given: ScheduleSettings) -> None:
    """ConfigError if a schedule does not have these settings, or requires others."""
    accepted = SCHEDULE_SETTINGS.get(kind, {})
    for name, value in given.items():
        where = f"lr_scheduler_kwargs.{name}"
        if name not in accepted:
            has = f"has {', '.join(accepted)}" if accepted else "has none"
            hint = did_you_mean(name, accepted)
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
