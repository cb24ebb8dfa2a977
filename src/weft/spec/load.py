"""Reads a jobs file: YAML, `defaults`, and `key=value` overrides from the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from weft.errors import ConfigError
from weft.spec.adapter import AdapterSpec
from weft.spec.fields import describe, field_names, read
from weft.spec.job import JobSpec
from weft.spec.run import RunSpec


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> RunSpec:
    """The run described by a YAML file, with overrides such as `jobs.0.adapter.r=32` applied.

    Paths inside the file stay as written; they are relative to the file's directory.
    """
    path = Path(path)
    tree, lines = _parse(path)
    for override in overrides:
        apply_override(tree, override)
    try:
        return run_from_mapping(tree)
    except ConfigError as error:
        line = _line_of(error.where, lines)
        place = f"{path} line {line}" if line else str(path)
        where = f"{place}: {error.where}" if error.where else place
        raise ConfigError(error.message, where=where, hint=error.hint) from None


def run_from_mapping(tree: Any) -> RunSpec:
    """The run described by plain data, as YAML or JSON gives it."""
    if not isinstance(tree, Mapping):
        raise ConfigError(f"expected settings such as base_model and jobs, got {describe(tree)}.")
    values = dict(tree)
    defaults = values.get("defaults") or {}
    if not isinstance(defaults, Mapping):
        raise ConfigError(f"expected a mapping of job settings, got {describe(defaults)}.", where="defaults")
    if "name" in defaults:
        raise ConfigError("a name cannot be a default: each job has its own.", where="defaults.name")
    # Read the defaults once by themselves, so that a mistake there is reported there and not in the first job.
    alone = {"name": "defaults", "train_data": ["none"], "eval_data": 1}
    read(JobSpec, _merge(alone, _canonical(defaults, JobSpec)), "defaults")
    jobs = values.get("jobs")
    if not isinstance(jobs, list):
        raise ConfigError(f"expected a list of jobs, got {describe(jobs)}.", where="jobs")
    values["jobs"] = [_job(job, defaults, i) for i, job in enumerate(jobs)]
    return read(RunSpec, values)


def _job(job: Any, defaults: Mapping[str, Any], index: int) -> JobSpec:
    where = f"jobs.{index}"
    if not isinstance(job, Mapping):
        raise ConfigError(f"expected a mapping with name and train_data, got {describe(job)}.", where=where)
    # Reading the job's own words first keeps an alias of a default from hiding a misspelt key.
    own = _canonical(job, JobSpec)
    return read(JobSpec, _merge(_canonical(defaults, JobSpec), own), where)


def _canonical(values: Mapping[str, Any], cls: type) -> dict[str, Any]:
    """The mapping under the fields' own names, so that a job's `lr` beats a default `learning_rate`."""
    names = field_names(cls)
    result: dict[str, Any] = {}
    for key, value in values.items():
        name = names.get(str(key), str(key))
        if name in result:
            raise ConfigError(f"{key} and {name} are two names of one setting; keep one.", where=str(key))
        result[name] = _canonical(value, AdapterSpec) if name == "adapter" and isinstance(value, Mapping) else value
    return result


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def apply_override(tree: Any, override: str) -> None:
    """Sets `a.b.c=value` inside a tree of mappings and lists, in place; list items go by index or by name."""
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise ConfigError(f"{override!r} is not an override; write key=value, e.g. jobs.0.adapter.r=32.")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"the value of {path} is not valid: {text!r}.", where=override) from None
    keys = path.split(".")
    node = tree
    for depth, key in enumerate(keys[:-1]):
        node = _child(node, key, ".".join(keys[: depth + 1]), override)
    last = keys[-1]
    if isinstance(node, list):
        node[_index(node, last, path, override)] = value
    elif isinstance(node, dict):
        node[last] = value
    else:
        raise ConfigError(f"{'.'.join(keys[:-1])} holds no settings.", where=override)


def _child(node: Any, key: str, path: str, override: str) -> Any:
    if isinstance(node, list):
        return node[_index(node, key, path, override)]
    if isinstance(node, dict):
        if not isinstance(node.get(key), dict | list):
            node[key] = {}
        return node[key]
    raise ConfigError(f"{path} does not lead to a setting.", where=override)


def _index(items: list[Any], key: str, path: str, override: str) -> int:
    names = [item.get("name") for item in items if isinstance(item, dict)]
    if key in names:
        return names.index(key)
    if key.isdigit() and int(key) < len(items):
        return int(key)
    known = ", ".join(str(n) for n in names)
    raise ConfigError(f"{path}: there is no item {key!r}; there are 0 to {len(items) - 1} ({known}).", where=override)


def _parse(path: Path) -> tuple[Any, dict[str, int]]:
    """The file as plain data, and the line on which each dotted path starts."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            "there is no such file.", where=str(path), hint="`weft init` writes one to start from."
        ) from None
    except IsADirectoryError:
        raise ConfigError("is a directory, not a jobs file.", where=str(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read ({error}).", where=str(path)) from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is None:
            raise ConfigError("the file is empty.", where=str(path), hint="`weft init` writes one to start from.")
        lines: dict[str, int] = {}
        _collect_lines(node, "", lines, str(path))
        return yaml.safe_load(text), lines
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path} line {mark.line + 1}" if mark else str(path)
        raise ConfigError(f"is not valid YAML: {getattr(error, 'problem', error)}.", where=where) from None
    except RecursionError:
        raise ConfigError("is nested too deeply.", where=str(path)) from None


def _collect_lines(node: yaml.Node, prefix: str, lines: dict[str, int], path: str) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            place = f"{prefix}.{key.value}" if prefix else str(key.value)
            if place in lines:
                raise ConfigError(
                    f"{place} is set twice, here and on line {lines[place]}.",
                    where=f"{path} line {key.start_mark.line + 1}",
                )
            lines[place] = key.start_mark.line + 1
            _collect_lines(value, place, lines, path)
    elif isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            place = f"{prefix}.{i}"
            lines[place] = item.start_mark.line + 1
            _collect_lines(item, place, lines, path)


def _line_of(where: str | None, lines: Mapping[str, int]) -> int | None:
    """The line of the deepest known part of a dotted path."""
    parts = (where or "").split(".")
    while parts:
        line = lines.get(".".join(parts))
        if line:
            return line
        parts.pop()
    return None
