"""Turns the API's parameters into a JobSpec, the same validated type that `weft train` reads.

`auto` is resolved by fixed rules, from nothing but the number of training samples n:

| hyper-parameter | auto |
|---|---|
| n_epochs | 3 for n < 1,000; 2 for n < 10,000; else 1 |
| batch_size | n / 8 rounded down, at least 1 and at most 8; 16 for n >= 10,000 |
| learning_rate_multiplier | 1, of a peak learning rate of 2e-4 |
| beta (method dpo) | 0.1 |
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.errors import ConfigError
from weft.serve.records.rows import DbRow
from weft.spec import AdapterSpec, JobSpec
from weft.spec.fields import read
from weft.spec.load import canonical

BASE_LEARNING_RATE = 2e-4
BASE_BETA = 0.1
OURS = ("name", "train_data", "eval_data", "tenant", "priority", "seed")
"""Settings of a job that only the service sets."""
REFUSED = {
    "init_adapter": "names a directory of the server",
    "chat_template": "is a program that would run on the server",
}
"""Settings of a jobs file that a stranger may not use, and why."""
_MODULE = re.compile(r"[A-Za-z0-9_.-]{1,200}")
"""A plain module name; a regular expression of a stranger could keep the worker busy for ever."""


def resolve(hyperparameters: Mapping[str, Any], num_samples: int) -> dict[str, Any]:
    """Returns n_epochs, batch_size, learning_rate_multiplier and, if it is among them, beta as numbers."""
    auto = {
        "n_epochs": 3 if num_samples < 1_000 else 2 if num_samples < 10_000 else 1,
        "batch_size": min(8, max(1, num_samples // 8)) if num_samples < 10_000 else 16,
        "learning_rate_multiplier": 1.0,
        **({"beta": BASE_BETA} if "beta" in hyperparameters else {}),
    }
    given = {name: value for name, value in hyperparameters.items() if value not in (None, "auto")}
    return auto | given


def job_settings(hyperparameters: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the `settings` column: what a jobs file would say about the job, without its name, data and owner.

    `hyperparameters` are resolved; `extra` comes from `user_settings` and takes precedence.
    """
    settings: dict[str, Any] = {
        "num_train_epochs": hyperparameters["n_epochs"],
        "global_batch_size": hyperparameters["batch_size"],
        "learning_rate": BASE_LEARNING_RATE * hyperparameters["learning_rate_multiplier"],
        **({"beta": hyperparameters["beta"]} if "beta" in hyperparameters else {}),
    }
    return settings | dict(extra)


def used_hyperparameters(resolved: Mapping[str, Any], extra: Mapping[str, Any], job: JobSpec) -> dict[str, Any]:
    """Returns the hyper-parameters that a job trains by: where `extra` says otherwise, those that it comes to.

    A job that ends by its steps has no n_epochs, nor has one of half an epoch: OpenAI's clients take whole numbers.
    """
    used = {**resolved, "batch_size": job.batch_size, "n_epochs": int(job.num_train_epochs)}
    if job.objective == "dpo":
        used["beta"] = BASE_BETA if job.beta is None else job.beta
    if "learning_rate" in extra:
        used["learning_rate_multiplier"] = job.learning_rate / BASE_LEARNING_RATE
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
        _check_modules(adapter)
    return own


def _check_modules(adapter: Mapping[str, Any]) -> None:
    """Refuses regular expressions: modules are named, not matched."""
    for name in ("target_modules", "exclude_modules", "feedforward_modules", "rank_pattern", "alpha_pattern"):
        value = adapter.get(name)
        for word in [value] if isinstance(value, str) else value if isinstance(value, list | dict) else []:
            if isinstance(word, str) and not _MODULE.fullmatch(word):
                raise ConfigError(f"{word[:60]!r} is not a module name such as q_proj.", where=f"lora.{name}")


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
