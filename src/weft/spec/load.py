"""Reads a jobs file: YAML, `defaults`, and `key=value` overrides from the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from weft.errors import ConfigError, closest
from weft.settings.fields import describe, field_names, join, read, without_foreign
from weft.settings.other_trainers import FOREIGN
from weft.spec.adapter import AdapterSpec
from weft.spec.job import JobSpec
from weft.spec.run import RunSpec
from weft.spec.sweep import SweepSpec

_BELOW: Mapping[tuple[type, str], type] = {
    (RunSpec, "jobs"): JobSpec,
    (RunSpec, "defaults"): JobSpec,
    (SweepSpec, "defaults"): JobSpec,
    (JobSpec, "adapter"): AdapterSpec,
}
"""What the settings inside a setting are."""
_HOMES: Mapping[type, str] = {
    RunSpec: "the whole run; write it at the top of the file",
    JobSpec: "a job; write it in an item of jobs, or in defaults for all of them",
    AdapterSpec: "the adapter; write it in adapter of a job or of defaults",
}
"""Where settings go, for those that stand elsewhere."""
FileKind = Literal["jobs", "sweep", "space", "cluster"]
_FIRST_FILE: Mapping[FileKind, str] = {
    "jobs": "`weft init` writes a jobs file to start from.",
    "sweep": "`weft config --sweep` lists what a sweep file says.",
    "space": "It has the parameters to search, as `space` of a sweep file.",
    "cluster": "docs/deploy.md shows one to start from.",
}
"""How to come to a file that is not there, or is empty."""


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> RunSpec:
    """The run described by a YAML file, with overrides such as `jobs.0.adapter.r=32` applied.

    Paths inside the file stay as written; they are relative to the file's directory.
    """
    path = Path(path)
    tree, lines = parse(path)
    given = {apply_override(tree, override): override for override in overrides}
    try:
        return run_from_mapping(tree)
    except ConfigError as error:
        where = place_of(error.where, path, lines, given)
        raise error.at(where) from None


def locate(setting: str, path: str | Path, overrides: Sequence[str] = ()) -> str:
    """Where a setting such as `jobs.0.adapter.r` was written, for mistakes that show only later.

    `jobs.yaml line 7: jobs.0.adapter.r`, or the override that set it.
    """
    path = Path(path)
    tree, lines = parse(path)
    given = {apply_override(tree, override): override for override in overrides}
    return place_of(setting, path, lines, given)


def run_from_mapping(tree: Any) -> RunSpec:
    """The run described by plain data, as YAML or JSON gives it."""
    if not isinstance(tree, Mapping):
        raise ConfigError(f"expected settings such as base_model and jobs, got {describe(tree)}.")
    _check_places(tree, RunSpec)
    values = dict(tree)
    defaults = values.get("defaults") or {}
    if not isinstance(defaults, Mapping):
        raise ConfigError(f"expected a mapping of job settings, got {describe(defaults)}.", where="defaults")
    if "name" in defaults:
        raise ConfigError("a name cannot be a default: each job has its own.", where="defaults.name")
    # Read the defaults once by themselves, so that a mistake there is reported there and not in the first job.
    alone = {"name": "defaults", "train_data": ["none"], "eval_data": 1}
    read(JobSpec, merge(alone, canonical(defaults, JobSpec, "defaults")), "defaults")
    jobs = values.get("jobs")
    if not isinstance(jobs, list):
        hint = (
            "This is a sweep file: `weft sweep` trains it, and with --dry-run plans it." if "space" in values else None
        )
        raise ConfigError(f"expected a list of jobs, got {describe(jobs)}.", where="jobs", hint=hint)
    values["jobs"] = [_job(job, defaults, i) for i, job in enumerate(jobs)]
    return read(RunSpec, values)


def _check_places(values: Any, cls: type, where: str = "") -> None:
    """Settings that are known, but not of this place, are told where they go."""
    if not isinstance(values, Mapping):
        return
    names = field_names(cls)
    for key, value in values.items():
        if str(key) in FOREIGN:
            continue
        place = join(where, str(key))
        home = next((other for other in _HOMES if str(key) in field_names(other)), None)
        # Jobs and runs both have a name, and each is far from the other.
        if str(key) not in (*names, "name") and home is not None:
            raise ConfigError(f"is a setting of {_HOMES[home]}.", where=place)
        if str(key) not in names and home is None and closest(str(key), list(names)) is None:
            _guess_home(str(key), place)
        below = _BELOW.get((cls, names.get(str(key), "")))
        if below is not None and isinstance(value, list):
            for i, item in enumerate(value):
                _check_places(item, below, f"{place}.{i}")
        elif below is not None:
            _check_places(value, below, place)


def _guess_home(key: str, place: str) -> None:
    """ConfigError if a setting of another place has nearly that name."""
    for other, home in _HOMES.items():
        guess = closest(key, list(field_names(other)))
        if guess is not None:
            raise ConfigError("unknown setting.", where=place, hint=f"Did you mean {guess}, a setting of {home}?")


def _job(job: Any, defaults: Mapping[str, Any], index: int) -> JobSpec:
    where = f"jobs.{index}"
    if not isinstance(job, Mapping):
        raise ConfigError(f"expected a mapping with name and train_data, got {describe(job)}.", where=where)
    # Reading the job's own words first keeps an alias of a default from hiding a misspelt key.
    own = canonical(job, JobSpec, where)
    return read(JobSpec, merge(_fitting(canonical(defaults, JobSpec, "defaults"), own), own), where)


def _fitting(defaults: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults, less settings that the PEFT method a job names does not have."""
    adapter = own.get("adapter")
    method = adapter.get("method") if isinstance(adapter, Mapping) else None
    if not isinstance(method, str):
        return defaults
    fitting = without_foreign(JobSpec, defaults, method)
    if isinstance(fitting.get("adapter"), Mapping):
        fitting["adapter"] = without_foreign(AdapterSpec, fitting["adapter"], method)
    return fitting


def canonical(values: Mapping[str, Any], cls: type, where: str) -> dict[str, Any]:
    """The mapping under the fields' own names, so that a job's `lr` beats a default `learning_rate`."""
    names = field_names(cls)
    result: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for key, value in values.items():
        name, place = names.get(str(key), str(key)), join(where, str(key))
        if name in result:
            raise ConfigError(f"{spelled[name]} and {key} are two names of one setting; keep one.", where=place)
        spelled[name] = str(key)
        below = _BELOW.get((cls, name))
        result[name] = canonical(value, below, place) if below and isinstance(value, Mapping) else value
    return result


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `base`, with those of `over` in their place; mappings are merged, anything else is replaced."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def apply_override(tree: Any, override: str, root: type = RunSpec) -> str:
    """Sets `a.b.c=value` inside a tree of mappings and lists, in place; list items go by index or by name.

    Returns the place that was set, in the settings' own names; `root` is what the whole tree describes.
    """
    path, equals, text = override.partition("=")
    keys = path.split(".")
    if not equals or not all(keys):
        raise ConfigError(f"{override!r} is not an override; write key=value, e.g. jobs.0.adapter.r=32.")
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        raise ConfigError(f"the value of {path} is not valid: {text!r}.", where=override) from None
    node, place = tree, ""
    for key in keys[:-1]:
        known = _known_key(node, key, place, override, root)
        place = join(place, str(known))
        if isinstance(node, dict) and node.get(known) is None:
            node[known] = {}
        node = node[known]
    last = _known_key(node, keys[-1], place, override, root)
    node[last] = value
    return _own_names(join(place, str(last)), root)


def _known_key(node: Any, key: str, place: str, override: str, root: type) -> Any:
    """The index of a list's item, or the name under which a mapping already has the setting."""
    if isinstance(node, list):
        return _index(node, key, join(place, key), override)
    if isinstance(node, dict):
        own = _own_names(join(place, key), root)
        return next((known for known in node if _own_names(join(place, str(known)), root) == own), key)
    raise ConfigError(f"{place or 'the file'} holds no settings.", where=override)


def _index(items: list[Any], key: str, path: str, override: str) -> int:
    names = [item.get("name") if isinstance(item, dict) else None for item in items]
    if key in names:
        return names.index(key)
    if key.isdecimal() and int(key) < len(items):
        return int(key)
    known = ", ".join(str(n) for n in names)
    raise ConfigError(f"{path}: there is no item {key!r}; there are 0 to {len(items) - 1} ({known}).", where=override)


def parse(path: Path, kind: FileKind = "jobs") -> tuple[Any, dict[str, int]]:
    """The file as plain data, and the line on which each dotted path starts; errors say what kind of file it is."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError("there is no such file.", where=str(path), hint=_FIRST_FILE[kind]) from None
    except IsADirectoryError:
        raise ConfigError(f"is a directory, not a {kind} file.", where=str(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read ({error}).", where=str(path)) from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is None:
            raise ConfigError("the file is empty.", where=str(path), hint=_FIRST_FILE[kind])
        lines: dict[str, int] = {}
        _collect_lines(node, "", lines, str(path))
        return yaml.safe_load(text), lines
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path} line {mark.line + 1}" if mark else str(path)
        said = (getattr(error, "context", None), getattr(error, "problem", error))
        found = " ".join(", ".join(str(part) for part in said if part).split())
        raise ConfigError(f"is not valid YAML: {found}.", where=where) from None
    except ValueError as error:
        # A date or a number that has the form of one and is none, such as 2024-02-30.
        raise ConfigError(f"holds a value that means nothing: {error}.", where=str(path)) from None
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


def place_of(
    where: str | None, path: Path, lines: Mapping[str, int], overrides: Mapping[str, str], root: type = RunSpec
) -> str:
    """What an error about a setting is said to be about: the override that set it, else the line of the file."""
    if not where:
        return str(path)
    own = _own_names(where, root)
    parts = own.split(".")
    # What a job does not say itself was said in the defaults.
    asked = [own, ".".join(["defaults", *parts[2:]])] if parts[0] == "jobs" and len(parts) > 2 else [own]
    known = {_own_names(place, root): line for place, line in lines.items()}
    for place, override in overrides.items():
        is_new = own not in known and place.startswith(f"{own}.")
        if is_new or any(f"{setting}.".startswith(f"{place}.") for setting in asked):
            return override if override.startswith(f"{where}=") else f"{override}: {where}"
    asked += [".".join(parts[:depth]) for depth in range(len(parts) - 1, 0, -1)]
    line = next((known[setting] for setting in asked if setting in known), None)
    return f"{path} line {line}: {where}" if line else f"{path}: {where}"


def _own_names(place: str, root: type) -> str:
    """A dotted path as errors write it: every second name replaced by the setting's own."""
    cls: type | None = root
    parts = []
    for part in place.split("."):
        if cls is not None and not part.isdecimal():
            part = field_names(cls).get(part, part)
            cls = _BELOW.get((cls, part))
        parts.append(part)
    return ".".join(parts)
