"""Turns the API's parameters into a JobSpec, the same validated type that `weft train` reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.errors import ConfigError
from weft.serve.records.rows import DbRow
from weft.settings.fields import read
from weft.spec import AdapterSpec, JobSpec
from weft.spec.choices.openai_hyperparameters import BASE_BETA, training_settings
from weft.spec.load import canonical

OURS = ("name", "train_data", "eval_data", "tenant", "priority", "seed")
"""Settings of a job that only the service sets."""
REFUSED = {
    "init_adapter": "names a directory of the server",
    "reference": "names a directory of the server",
    "teacher": "names a directory of the server",
    "chat_template": "is a program that would run on the server",
}
"""Settings of a jobs file that a stranger may not use, and why."""
_MODULE = re.compile(r"[A-Za-z0-9_.-]{1,200}")
"""A plain module name; a regular expression of a stranger could keep the worker busy for ever."""


def job_settings(hyperparameters: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the `settings` column: what a jobs file would say about the job, without its name, data and owner.

    `hyperparameters` are resolved; `extra` comes from `user_settings` and takes precedence.
    """
    return training_settings(hyperparameters, extra.get("adapter")) | dict(extra)


def used_hyperparameters(resolved: Mapping[str, Any], extra: Mapping[str, Any], job: JobSpec) -> dict[str, Any]:
    """Returns the hyper-parameters that a job trains by: where `extra` says otherwise, those that it comes to.

    A job that ends by its steps has no n_epochs, nor has one of half an epoch: OpenAI's clients take whole numbers.
    """
    used = {**resolved, "batch_size": job.batch_size, "n_epochs": int(job.num_train_epochs)}
    if job.objective == "dpo":
        used["beta"] = BASE_BETA if job.beta is None else job.beta
    if "learning_rate" in extra:
        used["learning_rate_multiplier"] = job.learning_rate / job.adapter.config.learning_rate
    if job.max_steps is not None or not job.num_train_epochs.is_integer():
        del used["n_epochs"]
    return used


def user_settings(settings: Mapping[str, Any], short: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a user's settings under their full names, with the short forms merged in; refuses forbidden ones."""
    own = canonical(settings, JobSpec, "settings")
    for name in OURS:
        if name in own:
            raise ConfigError("is set by the service; leave it out.", where=f"settings.{name}")
    for name, reason in REFUSED.items():
        if own.get(name) is not None:
            raise ConfigError(f"{reason}; leave it out.", where=f"settings.{name}")
    for name, value in short.items():
        if name in own:
            raise ConfigError("is given twice; keep one.", where=f"settings.{name}")
        own[name] = canonical(value, AdapterSpec, "lora") if name == "adapter" else value
    adapter = own.get("adapter")
    if isinstance(adapter, Mapping):
        if adapter.get("new_tokens"):
            raise ConfigError(
                "the service answers with the backbone's own tokens; leave it out.", where="lora.new_tokens"
            )
        for name in ("target_modules", "exclude_modules", "feedforward_modules", "rank_pattern", "alpha_pattern"):
            _check_modules(adapter.get(name), f"lora.{name}")
    _check_modules(own.get("learning_rate_pattern"), "settings.learning_rate_pattern")
    return own


def _check_modules(value: Any, where: str) -> None:
    """Refuses regular expressions: modules are named, not matched."""
    for word in [value] if isinstance(value, str) else value if isinstance(value, list | dict) else []:
        if isinstance(word, str) and not _MODULE.fullmatch(word):
            raise ConfigError(f"{word[:60]!r} is not a module name such as q_proj.", where=where)


def build_spec(
    settings: Mapping[str, Any],
    *,
    name: str,
    train_data: Path | str,
    eval_data: Path | str | None = None,
    seed: int = 42,
    priority: int = 0,
    tenant: str = "default",
) -> JobSpec:
    """Makes the JobSpec of a `settings` column; a ConfigError names a wrong setting."""
    values: dict[str, Any] = {**settings, "name": name, "train_data": [str(train_data)]}
    if eval_data is not None:
        values["eval_data"] = [str(eval_data)]
    return read(JobSpec, {**values, "seed": seed, "priority": priority, "tenant": tenant})


def spec_of(job: DbRow, train_data: Path | str, eval_data: Path | str | None = None) -> JobSpec:
    """Makes the JobSpec of a job's row, with its files where the worker has put them."""
    return build_spec(
        job["settings"],
        name=job["id"],
        train_data=train_data,
        eval_data=eval_data,
        seed=job["seed"],
        priority=job["priority"],
        tenant=job["tenant"],
    )
