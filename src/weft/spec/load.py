"""Reads a jobs file: YAML, `defaults`, and `key=value` overrides from the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import yaml

from weft.errors import ConfigError, closest
from weft.other_trainers import FOREIGN
from weft.settings import describe, field_names, join, read, without_foreign
from weft.spec.adapter import AdapterSpec
from weft.spec.choices import OPTIMIZER_NAMES
from weft.spec.job import JobSpec
from weft.spec.run import RunSpec
from weft.spec.sweep import SweepSpec

_BELOW: Mapping[tuple[type, str], type] = {
    (RunSpec, "jobs"): JobSpec,
    (RunSpec, "defaults"): JobSpec,
    (SweepSpec, "defaults"): JobSpec,
    (JobSpec, "adapter"): AdapterSpec,
}
_HOMES: Mapping[type, str] = {
    RunSpec: "the whole run; write it at the top of the file",
    JobSpec: "a job; write it in an item of jobs, or in defaults for all of them",
    AdapterSpec: "the adapter; write it in adapter of a job or of defaults",
}
"""The right location of settings, for those that are elsewhere."""
MOST_ALIASED = 100_000
"""Maximum number of values that the aliases of a file stand for."""
FileKind = Literal["jobs", "sweep", "space", "cluster"]
_FIRST_FILE: Mapping[FileKind, str] = {
    "jobs": "`weft init` writes a jobs file to start from.",
    "sweep": "`weft config --sweep` lists the settings of a sweep file.",
    "space": "It has the parameters to search, as `space` of a sweep file.",
    "cluster": "docs/deploy.md shows one to start from.",
}
"""How to make a file that is missing or empty."""


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> RunSpec:
    """The run described by a YAML file, with overrides such as `jobs.0.adapter.r=32` applied. Paths inside the file
    stay as written; they are relative to the file's directory."""
    tree, locate = _parsed(Path(path), overrides)
    try:
        return run_from_mapping(tree)
    except ConfigError as error:
        raise error.at(locate(error.where)) from None


def locate(setting: str, path: str | Path, overrides: Sequence[str] = ()) -> str:
    """Where a setting such as `jobs.0.adapter.r` was written, for later errors. `jobs.yaml line 7: jobs.0.adapter.r`,
    or the override that set it."""
    return _parsed(Path(path), overrides)[1](setting)


def _parsed(path: Path, overrides: Sequence[str]) -> tuple[Any, Callable[[str | None], str]]:
    """A jobs file with overrides, and a function that locates a setting in them."""
    tree, lines = parse(path)
    given = {apply_override(tree, override): override for override in overrides}
    return tree, lambda setting: location_of(setting, path, lines, given)


@contextmanager
def located(path: str | Path, overrides: Sequence[str] = ()) -> Iterator[None]:
    """Errors about a setting of a job name where it was written."""
    try:
        yield
    except ConfigError as error:
        if error.where is None or not error.where.startswith("jobs."):
            raise
        raise error.at(locate(error.where, path, overrides)) from None


def run_from_mapping(tree: Any) -> RunSpec:
    if not isinstance(tree, Mapping):
        raise ConfigError(f"expected settings such as base_model and jobs, got {describe(tree)}.")
    _check_sections(tree, RunSpec)
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


def _check_sections(values: Any, cls: type, where: str = "") -> None:
    """ConfigError for known settings in the wrong section, with the right one."""
    if not isinstance(values, Mapping):
        return
    names = field_names(cls)
    everywhere = list(dict.fromkeys([*names, *(name for home in _HOMES for name in field_names(home))]))
    for key, value in values.items():
        if str(key) in FOREIGN:
            continue
        path = join(where, str(key))
        home = next((other for other in _HOMES if str(key) in field_names(other)), None)
        # Jobs and runs both have a name, and each is far from the other.
        if str(key) not in (*names, "name") and home is not None:
            raise ConfigError(f"is a setting of {_HOMES[home]}.", where=path)
        guess = closest(str(key), everywhere) if str(key) not in names and home is None else None
        if guess is not None and guess not in names:
            right = next(_HOMES[other] for other in _HOMES if guess in field_names(other))
            raise ConfigError("unknown setting.", where=path, hint=f"Did you mean {guess}, a setting of {right}?")
        below = _BELOW.get((cls, names.get(str(key), "")))
        if below is not None and isinstance(value, list):
            for i, item in enumerate(value):
                _check_sections(item, below, f"{path}.{i}")
        elif below is not None:
            _check_sections(value, below, path)


def _job(job: Any, defaults: Mapping[str, Any], index: int) -> JobSpec:
    where = f"jobs.{index}"
    if not isinstance(job, Mapping):
        raise ConfigError(f"expected a mapping with name and train_data, got {describe(job)}.", where=where)
    # Reading the job's own words first keeps an alias of a default from hiding a misspelt key.
    own = canonical(job, JobSpec, where)
    return read(JobSpec, merge(fitting(canonical(defaults, JobSpec, "defaults"), own), own), where)


def fitting(defaults: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults without settings of other methods, objectives and optimizers than those that the job names."""
    adapter = own.get("adapter")
    method = adapter.get("method") if isinstance(adapter, Mapping) else None
    optim = own.get("optim")
    named = {"methods": method, "objectives": own.get("objective"), "optims": OPTIMIZER_NAMES.get(str(optim), optim)}
    fitting = defaults
    for kind, chosen in named.items():
        if isinstance(chosen, str) and chosen != "auto":
            fitting = without_foreign(JobSpec, fitting, kind, chosen)
            if isinstance(fitting.get("adapter"), Mapping):
                fitting["adapter"] = without_foreign(AdapterSpec, fitting["adapter"], kind, chosen)
    return fitting


def canonical(values: Mapping[str, Any], cls: type, where: str) -> dict[str, Any]:
    """The mapping under the fields' own names, so that a job's `lr` beats a default `learning_rate`."""
    names = field_names(cls)
    result: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for key, value in values.items():
        name, path = names.get(str(key), str(key)), join(where, str(key))
        if name in result:
            raise ConfigError(f"{spelled[name]} and {key} are two names of one setting; keep one.", where=path)
        spelled[name] = str(key)
        below = _BELOW.get((cls, name))
        result[name] = canonical(value, below, path) if below and isinstance(value, Mapping) else value
    return result


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `base`, overridden by those of `over`; mappings are merged, other values replaced."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def apply_override(tree: Any, override: str, root: type = RunSpec) -> str:
    """Sets `a.b.c=value` inside a tree of mappings and lists, in place; list items go by index or by name. Returns the
    path of the setting, in the settings' own names; `root` is what the whole tree describes."""
    path, equals, text = override.partition("=")
    keys = path.split(".")
    if not equals or not all(keys):
        raise ConfigError(f"{override!r} is not an override; write key=value, e.g. jobs.0.adapter.r=32.")
    if not text.strip():
        raise ConfigError("has no value; write one, or null for the default.", where=override)
    try:
        loader = yaml.SafeLoader(text)
        document = loader.get_single_node() or yaml.ScalarNode("tag:yaml.org,2002:null", "")  # a comment
        _check_aliases(document, override)
        value = loader.construct_document(document)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(f"the value of {path} is not valid: {text!r}.", where=override) from None
    node, parent = tree, ""
    for key in keys[:-1]:
        known = _known_key(node, key, parent, override, root)
        parent = join(parent, str(known))
        if isinstance(node, dict) and node.get(known) is None:
            node[known] = {}
        node = node[known]
    last = _known_key(node, keys[-1], parent, override, root)
    node[last] = value
    return _own_names(join(parent, str(last)), root)


def _known_key(node: Any, key: str, parent: str, override: str, root: type) -> Any:
    """The index of a list's item, or the name under which a mapping already has the setting."""
    if isinstance(node, list):
        return _index(node, key, join(parent, key), override)
    if isinstance(node, dict):
        own = _own_names(join(parent, key), root)
        return next((known for known in node if _own_names(join(parent, str(known)), root) == own), key)
    raise ConfigError(f"{parent or 'the file'} holds no settings.", where=override)


def _index(items: list[Any], key: str, path: str, override: str) -> int:
    names = [item.get("name") if isinstance(item, dict) else None for item in items]
    if key in names:
        return names.index(key)
    if key.isdecimal() and int(key) < len(items):
        return int(key)
    known = ", ".join(str(n) for n in names)
    raise ConfigError(f"{path}: there is no item {key!r}; there are 0 to {len(items) - 1} ({known}).", where=override)


def parse(path: Path, kind: FileKind = "jobs") -> tuple[Any, dict[str, int]]:
    """The file as plain data, and the line on which each dotted path starts; errors name the kind of file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if path.is_symlink():
            raise ConfigError(f"is a link to {path.readlink()}, which does not exist.", where=str(path)) from None
        raise ConfigError("there is no such file.", where=str(path), hint=_FIRST_FILE[kind]) from None
    except IsADirectoryError:
        raise ConfigError(f"is a directory, not a {kind} file.", where=str(path)) from None
    except UnicodeDecodeError:
        raise ConfigError("is not UTF-8 text.", where=str(path)) from None
    except OSError as error:
        raise ConfigError(f"cannot be read ({error}).", where=str(path)) from None
    if path.suffix in (".jsonl", ".ndjson", ".csv", ".tsv", ".txt"):
        found = f"is a data file by its name, not a {kind} file, which is YAML"
        raise ConfigError(f"{found}.", where=str(path), hint=_FIRST_FILE[kind])
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            raise ConfigError("the file is empty.", where=str(path), hint=_FIRST_FILE[kind])
        _check_aliases(node, str(path))
        lines: dict[str, int] = {}
        _collect_lines(node, "", lines, str(path))
        return loader.construct_document(node), lines
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path} line {mark.line + 1}" if mark else str(path)
        details = (getattr(error, "context", None), getattr(error, "problem", error))
        found = " ".join(", ".join(str(part) for part in details if part).split())
        raise ConfigError(f"is not valid YAML: {found}.", where=where) from None
    except ValueError as error:
        # A date or a number that has the form of one and is none, such as 2024-02-30.
        raise ConfigError(f"has an impossible value: {error}.", where=str(path)) from None
    except RecursionError:
        raise ConfigError("is nested too deeply.", where=str(path)) from None


def _check_aliases(node: yaml.Node, where: str) -> None:
    """ConfigError for aliases that stand for many values: a few lines of nested ones can stand for billions."""
    sizes: dict[yaml.Node, int] = {}

    def size(node: yaml.Node) -> int:
        if node not in sizes:
            sizes[node] = 2 * MOST_ALIASED  # for an alias within its own value
            inner = node.value if isinstance(node, yaml.CollectionNode) else []
            pairs = inner if isinstance(node, yaml.MappingNode) else [inner]
            sizes[node] = 1 + sum(size(each) for pair in pairs for each in pair)
        return sizes[node]

    if size(node) > len(sizes) + MOST_ALIASED:
        raise ConfigError(f"its aliases stand for more than {MOST_ALIASED:,} values; write fewer.", where=where)


def _collect_lines(node: yaml.Node, prefix: str, lines: dict[str, int], path: str) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name = f"{prefix}.{key.value}" if prefix else str(key.value)
            if name in lines:
                raise ConfigError(
                    f"{name} is set twice, here and on line {lines[name]}.",
                    where=f"{path} line {key.start_mark.line + 1}",
                )
            lines[name] = key.start_mark.line + 1
            _collect_lines(value, name, lines, path)
    elif isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            name = f"{prefix}.{i}"
            lines[name] = item.start_mark.line + 1
            _collect_lines(item, name, lines, path)


def location_of(
    where: str | None, path: Path, lines: Mapping[str, int], overrides: Mapping[str, str], root: type = RunSpec
) -> str:
    """Location of an error in a setting: the override that set it, else the line of the file."""
    if not where:
        return str(path)
    own = _own_names(where, root)
    parts = own.split(".")
    # Settings that a job lacks are in the defaults.
    written = [own, ".".join(["defaults", *parts[2:]])] if parts[0] == "jobs" and len(parts) > 2 else [own]
    known = {_own_names(name, root): line for name, line in lines.items()}
    for name, override in overrides.items():
        is_new = own not in known and name.startswith(f"{own}.")
        if is_new or any(f"{setting}.".startswith(f"{name}.") for setting in written):
            return override if override.startswith(f"{where}=") else f"{override}: {where}"
    written += [".".join(parts[:depth]) for depth in range(len(parts) - 1, 0, -1)]
    line = next((known[setting] for setting in written if setting in known), None)
    return f"{path} line {line}: {where}" if line else f"{path}: {where}"


def _own_names(path: str, root: type) -> str:
    """A dotted path with aliases replaced by the settings' own names."""
    cls: type | None = root
    parts = []
    for part in path.split("."):
        if cls is not None and not part.isdecimal():
            part = field_names(cls).get(part, part)
            cls = _BELOW.get((cls, part))
        parts.append(part)
    return ".".join(parts)
