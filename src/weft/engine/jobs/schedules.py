"""Learning rates as pure functions of the step; their names and formulas are those of transformers."""

from __future__ import annotations

import math

from weft.errors import ConfigError
from weft.spec import JobSpec
from weft.spec.choices.schedules import ScheduleSettings
from weft.wording import counted

_POLYNOMIAL_END = 1e-7


def warmup_steps(setting: float, num_steps: int) -> int:
    """Warm-up in steps, from a count or (below 1) a fraction of all steps."""
    return math.ceil(num_steps * setting) if setting < 1 else int(setting)


def check_steps(job: JobSpec, num_steps: int) -> None:
    """ConfigError if warm-up and decay do not fit a job's steps."""
    if job.lr_scheduler_type != "warmup_stable_decay":
        return
    settings = job.warmup_steps, float(job.lr_scheduler_kwargs["num_decay_steps"])
    # Not as they are rounded up: half of the steps each are all of them.
    asked = sum(each * num_steps if each < 1 else each for each in settings)
    if asked > num_steps + 1e-6:
        warmup, decay = (warmup_steps(each, num_steps) for each in settings)
        told = f"{counted(decay, 'step')} of decay" + (f" and {warmup:,} of warm-up" if warmup else "")
        found = f"{told} are more than the {num_steps:,} of the job"
        raise ConfigError(f"{found}.", where="lr_scheduler_kwargs.num_decay_steps")


def learning_rate(
    kind: str, peak: float, step: int, num_steps: int, warmup: int, settings: ScheduleSettings | None = None
) -> float:
    """The learning rate of the step-th step (from 0) of num_steps."""
    settings = settings or {}
    if kind == "constant":
        return peak
    if kind == "warmup_stable_decay":
        return peak * _stable_then_decay(step, num_steps, warmup, settings)
    if step < warmup:
        return peak * step / max(1, warmup)
    progress = (step - warmup) / max(1, num_steps - warmup)
    if kind == "constant_with_warmup":
        return peak
    if kind == "linear":
        return peak * max(0.0, 1.0 - progress)
    if kind == "cosine":
        return peak * max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))
    if kind == "cosine_with_restarts":
        within = float(settings.get("num_cycles", 1)) * progress % 1.0
        return peak * max(0.0, 0.5 * (1.0 + math.cos(math.pi * within))) if progress < 1 else 0.0
    if kind == "cosine_with_min_lr":
        least = float(settings["min_lr"]) / peak if "min_lr" in settings else float(settings["min_lr_rate"])
        return peak * max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)) * (1 - least) + least)
    if kind == "polynomial":
        return (peak - _POLYNOMIAL_END) * (1.0 - progress) + _POLYNOMIAL_END if progress < 1 else _POLYNOMIAL_END
    assert kind == "inverse_sqrt", kind
    timescale = warmup or 10_000
    return peak / math.sqrt((step + timescale - warmup) / timescale)


def _stable_then_decay(step: int, num_steps: int, warmup: int, settings: ScheduleSettings) -> float:
    """The share of the peak: up in a line, level, then down."""
    least = float(settings.get("min_lr_ratio", 0.0))
    decay = warmup_steps(float(settings["num_decay_steps"]), num_steps)
    stable = num_steps - warmup - decay
    if "num_stable_steps" in settings:
        stable = warmup_steps(float(settings["num_stable_steps"]), num_steps)
    if step < warmup:
        return step / max(1, warmup) * (1 - least) + least
    if step < warmup + stable:
        return 1.0
    if step >= warmup + stable + decay:
        return least
    progress = (step - warmup - stable) / max(1, decay)
    match settings.get("decay_type", "cosine"):
        case "linear":
            left = 1 - progress
        case "1-sqrt":
            left = 1 - math.sqrt(progress)
        case _:
            left = 0.5 * (1 + math.cos(math.pi * progress))
    return max(0.0, left * (1 - least) + least)
