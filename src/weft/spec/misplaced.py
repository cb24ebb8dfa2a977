"""Settings of a sweep file that are right but in the wrong place, each told where it belongs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.errors import ConfigError
from weft.settings.fields import describe, field_names, join
from weft.spec.adapter import AdapterSpec
from weft.spec.job import JobSpec
from weft.spec.sweep import EarlyStopSpec, ObjectiveSpec, SweepSpec

_BUDGETS = ("budget", "max_time", "max_minutes", "max_hours", "time_budget", "time_limit", "max_evals", "num_trials")
"""What other tools call the end of a search."""


def check_top(tree: Mapping[Any, Any]) -> None:
    """ConfigError for a setting of a job, an adapter, the objective or the early stop outside its section."""
    names = field_names(SweepSpec)
    for key, value in tree.items():
        name = str(key)
        if names.get(name) == "space" and (value is None or isinstance(value, list)):
            raise ConfigError(
                f"expected parameters such as r: [8, 16], or a file with them, got {describe(value)}.", where=name
            )
        if names.get(name) == "defaults" and not isinstance(value, Mapping | None):
            raise ConfigError(f"expected settings such as train_data: rows.jsonl, got {describe(value)}.", where=name)
        if name in names:
            continue
        if name in _BUDGETS:
            raise ConfigError("unknown setting.", where=name, hint="A budget is trials, max_tokens or max_seconds.")
        home = _home(name)
        if home is not None:
            raise ConfigError(f"is a setting of {home[0]}.", where=name, hint=home[1])


def _home(name: str) -> tuple[str, str] | None:
    """Whose setting a name is, and how to write it; None if it is nobody's."""
    searched = "or search it in space."
    if name in field_names(JobSpec) and name != "name":
        return "a job", f"Put it under job:, {searched}"
    if name in field_names(AdapterSpec):
        return "the adapter", f"Write job: {{adapter: {{{name}: …}}}}, {searched}"
    if name in field_names(ObjectiveSpec):
        return "the objective", f"Write objective: {{{name}: …}}."
    if name in field_names(EarlyStopSpec):
        return "the early stop", f"Write early_stop: {{{name}: …}}."
    return None


def check_job(defaults: Mapping[str, Any], where: str) -> None:
    """ConfigError for a setting of the adapter or of the whole sweep among those of a job."""
    for key in defaults:
        if key in field_names(JobSpec):
            continue
        if key in field_names(AdapterSpec):
            hint = f"Write adapter: {{{key}: …}}, or search it in space."
            raise ConfigError("is a setting of the adapter.", where=join(where, key), hint=hint)
        if key in field_names(SweepSpec):
            raise ConfigError(
                "is a setting of the sweep.", where=join(where, key), hint="Put it beside job:, not in it."
            )


def check_space(space: Mapping[str, Any]) -> None:
    """ConfigError for a setting of the whole sweep among the parameters to search."""
    known = {**field_names(JobSpec), **field_names(AdapterSpec)}
    for key in space:
        if key in field_names(SweepSpec) and key not in known:
            raise ConfigError(
                "is a setting of the sweep, the same for all trials.",
                where=join("space", key),
                hint="Put it beside space:, not in it.",
            )
