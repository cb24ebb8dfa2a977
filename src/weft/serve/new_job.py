"""What a new job brings: a training file, checked line by line, and parameters, which become a JobSpec.

Checking takes bounded memory and time: it reads one line at a time, of limited length and nesting. The worker reads the
rows with the same code, so a file that passes here is one that `weft train` accepts; and the JobSpec is the same
validated type that `weft train` reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from weft.data.formats import convert_rows
from weft.data.json_rows import ColumnMap, parse_json
from weft.data.row import BOM, Row, decode
from weft.errors import ConfigError, DataError, counted
from weft.objectives.registry import choose_objective
from weft.serve.db.engine import DbRow
from weft.serve.settings import ServiceLimits
from weft.settings import describe, read
from weft.spec import AdapterSpec, JobSpec
from weft.spec.choices import BASE_BETA, training_settings
from weft.spec.load import canonical

MAX_PROBLEMS = 20
"""After so many problems the rest of the file is not read."""


@dataclass(frozen=True)
class Problem:
    """A problem with one line, or with the whole file if `line` is None."""

    line: int | None
    message: str


@dataclass(frozen=True)
class Report:
    num_samples: int
    format: str | None
    problems: tuple[Problem, ...]


def check_training_file(
    stream: IO[bytes],
    name: str,
    limits: ServiceLimits,
    *,
    data_format: str | None = "auto",
    data_columns: Mapping[str, str | int] = MappingProxyType({}),
    objective: str = "auto",
    min_samples: int | None = None,
) -> Report:
    """Checks the whole file; with `data_format` None it only checks that each line is an object."""
    least = limits.min_samples if min_samples is None else min_samples
    problems: list[Problem] = []
    count, chosen = 0, None
    for number, line in _lines(stream, limits.line_bytes):
        try:
            row = _read_line(line, number, name, limits)
            if row is None:
                continue
            count += 1
            if data_format is not None:
                row = ColumnMap(data_columns).apply(row)
                found = _format_of(row, data_format, objective)
                if chosen not in (None, found):
                    raise DataError(f"is in the {found} format, but the lines before it are {chosen}.", where=row.where)
                chosen = found
        except DataError as error:
            problems.append(Problem(number, str(error)))
            # Nothing can be read after a line that is too long.
            if len(problems) >= MAX_PROBLEMS or len(line) > limits.line_bytes:
                break
        if count > limits.max_samples:
            problems.append(Problem(number, f"{name}: has more than {limits.max_samples:,} samples."))
            break
    if not problems and count < least:
        problems.append(Problem(None, f"{name}: has {counted(count, 'sample')}; at least {least} are needed."))
    return Report(count, chosen, tuple(problems))


def _format_of(row: Row, data_format: str, objective: str) -> str:
    """The format of a row that can be read; pairs of answers are trained on only where the job requests it."""
    chosen = choose_objective(objective, [row.values])
    if objective == "auto" and chosen.group_size > 1:
        raise DataError(f"is preference data, for the method {chosen.name}.", where=row.where)
    parts = chosen.parts(row.values, row.where)
    return convert_rows([Row(part.values, row.where) for part in parts], data_format)[0]


def _lines(stream: IO[bytes], most: int) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := stream.readline(most + 2):
        number += 1
        yield number, line.rstrip(b"\r\n")


def _read_line(line: bytes, number: int, name: str, limits: ServiceLimits) -> Row | None:
    where = f"{name} line {number}"
    if len(line) > limits.line_bytes:
        raise DataError(f"is longer than {limits.line_bytes:,} bytes.", where=where)
    text = decode(line.removeprefix(BOM) if number == 1 else line, name, number)
    if not text.strip():
        return None
    if number == 1 and text.startswith("["):
        raise DataError("a jsonl file has one object per line, not one list.", where=where)
    if number == 1 and not text.lstrip().startswith("{"):
        raise DataError(f'is {describe(text)}; each line is a JSON object such as {{"messages": [...]}}.', where=where)
    value = parse_json(text, where)
    if not isinstance(value, dict):
        raise DataError(f'is {describe(value)}; each line is an object such as {{"messages": [...]}}.', where=where)
    if depth_of(value, limits.nesting) > limits.nesting:
        raise DataError(f"is nested more than {limits.nesting} deep.", where=where)
    return Row(value, where)


def depth_of(value: object, most: int) -> int:
    """Returns how deep lists and objects are nested, counting no further than `most` + 1."""
    depth, level = 0, [value]
    while depth <= most:
        outer = [item for item in level if isinstance(item, dict | list)]
        if not outer:
            break
        depth += 1
        level = [inner for item in outer for inner in (item.values() if isinstance(item, dict) else item)]
    return depth


OURS = ("name", "train_data", "eval_data", "tenant", "priority", "seed")
REFUSED = {
    "init_adapter": "names a directory of the server",
    "reference": "names a directory of the server",
    "teacher": "names a directory of the server",
    "chat_template": "is a program that would run on the server",
}
"""Settings of a jobs file that a stranger may not use, and why."""
MAX_ENTRIES = 1024
"""The most entries of a list or object in a job's settings; no model has so many kinds of modules."""
MAX_TEXT = 1024
"""The most characters of a text in a job's settings."""
MAX_SIZE = 2**16
"""The greatest rank, layer or other size in the settings of an adapter; no linear of a known model is wider."""
MAX_NUMBER = 2**31 - 1
"""The greatest number in the other settings."""
_MODULE = re.compile(r"[A-Za-z0-9_.-]{1,200}")
"""A plain module name; a regular expression of a stranger could keep the worker busy for ever."""


def job_settings(hyperparameters: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the `settings` column: the job as in a jobs file, without its name, data and owner. `hyperparameters` are
    resolved; `extra` comes from `user_settings` and takes precedence."""
    return training_settings(hyperparameters, extra.get("adapter")) | dict(extra)


def used_hyperparameters(resolved: Mapping[str, Any], extra: Mapping[str, Any], job: JobSpec) -> dict[str, Any]:
    """Returns the hyper-parameters that a job trains by: with `extra` taken into account. A job that ends by its steps
    has no n_epochs, nor has one of half an epoch: OpenAI's clients take whole numbers."""
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
    for name, value in (("settings", settings), ("lora", short.get("adapter"))):
        _check_size(value, name)
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
        for name, value in adapter.items():
            # Alpha scales a product and is no size.
            if "alpha" not in name:
                _check_numbers(value, f"lora.{name}", MAX_SIZE)
        for name in ("target_modules", "exclude_modules", "feedforward_modules", "rank_pattern", "alpha_pattern"):
            _check_modules(adapter.get(name), f"lora.{name}")
    _check_modules(own.get("learning_rate_pattern"), "settings.learning_rate_pattern")
    _check_numbers({name: value for name, value in own.items() if name != "adapter"}, "settings", MAX_NUMBER)
    return own


def _check_size(value: Any, where: str) -> None:
    """Refuses lists, objects and texts that are longer than any model needs."""
    if isinstance(value, str) and len(value) > MAX_TEXT:
        raise ConfigError(f"has {len(value):,} characters; at most {MAX_TEXT:,} are accepted.", where=where)
    if not isinstance(value, list | Mapping):
        return
    if len(value) > MAX_ENTRIES:
        raise ConfigError(f"has {len(value):,} entries; at most {MAX_ENTRIES:,} are accepted.", where=where)
    for name, item in value.items() if isinstance(value, Mapping) else enumerate(value):
        _check_size(name, where)
        _check_size(item, f"{where}.{name}")


def _check_numbers(value: Any, where: str, most: int) -> None:
    if isinstance(value, int | float) and not abs(value) <= most:
        raise ConfigError(f"got {value}; use at most {most:,}.", where=where)
    if isinstance(value, list | Mapping):
        for name, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            _check_numbers(item, f"{where}.{name}", most)


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
