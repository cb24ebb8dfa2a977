"""All settings of jobs and sweep files, described from the spec dataclasses: as records, Markdown and JSON Schema.

`python -m weft.spec.reference` writes the Markdown of docs/configuration.md.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import json
import re
import textwrap
import types
import typing
from dataclasses import dataclass
from typing import Any

from weft.methods.lora.config import EvaSpec
from weft.settings import Rule, type_name
from weft.spec.adapter import AdapterSpec
from weft.spec.job import JobSpec, SourceSpec
from weft.spec.run import RunSpec
from weft.spec.sweep import RULES, TIMES_R, EarlyStopSpec, ObjectiveSpec, SweepSpec

_BOUNDS = {"at least": "minimum", "at most": "maximum", "above": "exclusiveMinimum", "below": "exclusiveMaximum"}
_WORDS = {
    int: "integer",
    tuple[JobSpec, ...]: "list of jobs",
    tuple[str | SourceSpec, ...]: "list of names or mappings",
    AdapterSpec: "mapping of adapter settings",
    EvaSpec: "mapping of EVA settings",
    ObjectiveSpec: "name of a metric, or mapping",
    EarlyStopSpec: "name of a rule, or mapping",
}
_REFERENCES: dict[Any, str] = {
    JobSpec: "job",
    AdapterSpec: "adapter",
    EvaSpec: "eva_config",
    SourceSpec: "source",
    ObjectiveSpec: "objective",
    EarlyStopSpec: "early_stop",
}
_LARGE = re.compile(r" and (at most|below) \d{7,}")
"""Limits too large to document."""
_NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
"""A number written as text: how YAML 1.1 reads 1e-4."""


@dataclass(frozen=True)
class Setting:
    name: str
    values: str
    """Type and limits, or the accepted values, in words."""
    default: str
    """Default as written in YAML; empty if the setting is required."""
    aliases: tuple[str, ...]
    description: str

    @property
    def is_required(self) -> bool:
        return not self.default


@dataclass(frozen=True)
class Section:
    title: str
    location: str
    """Where they are written."""
    settings: tuple[Setting, ...]


def sections() -> list[Section]:
    return [
        Section("Run", "at the top of the file", settings_of(RunSpec)),
        Section("Job", "in each item of `jobs`, or in `defaults` for all of them", settings_of(JobSpec)),
        Section("Data source", "as an item of `train_data` or `eval_data`, instead of a name", settings_of(SourceSpec)),
        Section("Adapter", "in `adapter` of a job or of `defaults`", settings_of(AdapterSpec)),
        Section("EVA", "in `eva_config` of an adapter", settings_of(EvaSpec)),
    ]


def sweep_sections() -> list[Section]:
    """Every setting that only sweep files have, or that differs there."""
    of_a_run = settings_of(RunSpec)
    own = tuple(s for s in settings_of(SweepSpec) if s not in of_a_run and s.name != "jobs")
    return [
        Section("Sweep", "at the top of a sweep file, beside those of a run except `jobs`", own),
        Section("Objective", "in `objective` of a sweep file", settings_of(ObjectiveSpec)),
        Section("Early stopping", "in `early_stop` of a sweep file", settings_of(EarlyStopSpec)),
    ]


@functools.cache
def settings_of(cls: type) -> tuple[Setting, ...]:
    texts = _descriptions(cls)
    hints = typing.get_type_hints(cls)
    return tuple(
        Setting(
            field.name,
            _values(hints[field.name], field),
            _default(field),
            field.metadata["aliases"],
            texts[field.name] + _owners(field),
        )
        for field in dataclasses.fields(cls)
    )


def _owners(field: dataclasses.Field[Any]) -> str:
    owners = field.metadata["objectives"] or field.metadata["optims"] or field.metadata["methods"]
    return f" For {', '.join(owners)}." if owners else ""


def _descriptions(cls: type) -> dict[str, str]:
    """The docstring under each field, including those of bases, as one line."""
    texts: dict[str, str] = {}
    for base in cls.__bases__:
        texts |= _descriptions(base) if dataclasses.is_dataclass(base) else {}
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    for above, below in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(above, ast.AnnAssign) and isinstance(above.target, ast.Name) and isinstance(below, ast.Expr):
            texts[above.target.id] = " ".join(ast.literal_eval(below.value).split())
    return texts


def _values(hint: Any, field: dataclasses.Field[Any]) -> str:
    choices, rule = field.metadata["choices"], field.metadata["rule"]
    if choices:
        return ", ".join(_yaml(choice) for choice in choices)
    kinds = [kind for kind in _kinds(hint) if kind is not type(None) and not (kind is int and float in _kinds(hint))]
    # Rules are for numbers.
    limits = "" if rule is None else f", {_LARGE.sub('', rule.text)}"
    rules = [limits if kind in (int, float) else "" for kind in kinds]
    return " or ".join((_WORDS.get(kind) or type_name(kind)) + own for kind, own in zip(kinds, rules, strict=True))


def _kinds(hint: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
        return "{}" if dataclasses.is_dataclass(value) else _yaml(value)
    return "" if field.default is dataclasses.MISSING else _yaml(field.default)


def _yaml(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)


def markdown() -> str:
    """The text of docs/configuration.md."""
    parts = [_INTRODUCTION]
    for section in (*sections(), *sweep_sections()):
        parts.append(f"## {section.title}\n\nWritten {section.location}.\n")
        parts.append("| setting | values | default | meaning |\n|---|---|---|---|")
        parts.extend(_table_row(setting) for setting in section.settings)
        parts.append("")
    return "\n".join(parts)


def _table_row(setting: Setting) -> str:
    also = "".join(f"<br>`{alias}`" for alias in setting.aliases)
    default = "**required**" if setting.is_required else f"`{setting.default}`"
    return f"| `{setting.name}`{also} | {setting.values} | {default} | {setting.description} |"


_INTRODUCTION = """\
# Configuration

A jobs file is YAML: one backbone, the jobs trained on it, and where the results go. `weft init` writes one that runs.

```yaml
base_model: tiny
output_dir: runs/first
defaults:
  learning_rate: 4e-3
  adapter: {r: 8}
jobs:
  - {name: shout, train_data: data/shout.jsonl}
  - {name: reverse, train_data: data/reverse.jsonl, adapter: {r: 16}}
```

Settings of a job override `defaults`, and `defaults` override the defaults below. Paths of data and adapters are
relative to the jobs file. The command line can change settings: `weft train jobs.yaml jobs.reverse.adapter.r=32`.
Further names in the first column are accepted spellings from other tools. Unknown names are errors; for methods,
objectives and settings that only other trainers have, the error names the nearest one here.

`weft config` shows this page in the terminal, `weft config jobs.yaml` checks a file and shows every resulting value,
`weft config --schema` prints a JSON Schema for editors; `--sweep` does the same for sweep files.

This page is generated: `python -m weft.spec.reference > docs/configuration.md`.
"""


def json_schema() -> dict[str, Any]:
    """A JSON Schema of the jobs file with all aliases, for editors that complete and check YAML. It cannot express that
    a setting is given under two names, or that a value fits the backbone; `weft config FILE` can."""
    run = _object(RunSpec)
    run["properties"]["defaults"] = {"$ref": "#/$defs/defaults", "description": _named(RunSpec, "defaults").description}
    run["allOf"] = [_one_of("base_model", RunSpec)]
    run["required"] = ["jobs"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Weft jobs file",
        **run,
        # A job's data may come from `defaults`, so only the name is required here.
        "$defs": {
            "job": _object(JobSpec) | {"required": ["name"]},
            "defaults": _shared_settings(),
            "adapter": _object(AdapterSpec),
            "eva_config": _object(EvaSpec),
            "source": _object(SourceSpec) | {"required": ["path"]},
        },
    }


def sweep_schema() -> dict[str, Any]:
    """The same of a sweep file; it leaves the parameters of the space open, which are settings of a job or its
    adapter."""
    sweep = _object(SweepSpec)
    properties = sweep["properties"]
    del properties["jobs"]
    for name in ("defaults", *_named(SweepSpec, "defaults").aliases):
        properties[name] = {"$ref": "#/$defs/defaults", "description": properties[name]["description"]}
    for name, short in (("objective", {"type": "string"}), ("early_stop", {"enum": [*RULES, False]})):
        for spelling in (name, *_named(SweepSpec, name).aliases):
            about = properties[spelling]["description"]
            properties[spelling] = {"anyOf": [short, {"$ref": f"#/$defs/{name}"}], "description": about}
    sweep["allOf"] = [_one_of("base_model", RunSpec), _one_of("space", SweepSpec)]
    parts = {_REFERENCES[kind]: _object(kind) for kind in (AdapterSpec, EvaSpec, ObjectiveSpec, EarlyStopSpec)}
    for spelling in ("lora_alpha", *_named(AdapterSpec, "lora_alpha").aliases):
        parts["adapter"]["properties"][spelling]["anyOf"].append({"type": "string", "pattern": TIMES_R})
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Weft sweep file",
        **sweep,
        "$defs": {"defaults": _shared_settings(), "source": _object(SourceSpec) | {"required": ["path"]}, **parts},
    }


def _shared_settings() -> dict[str, Any]:
    """Settings of a job that several jobs share, so without its name."""
    defaults = _object(JobSpec)
    del defaults["properties"]["name"]
    return defaults


def _object(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    properties: dict[str, Any] = {}
    for field, setting in zip(dataclasses.fields(cls), settings_of(cls), strict=True):
        schema = _value_schema(hints[field.name], field)
        properties[setting.name] = {**schema, "description": setting.description}
        if not setting.is_required:
            properties[setting.name]["default"] = _plain_default(field)
        for alias in setting.aliases:
            properties[alias] = {**schema, "description": f"Another name of {setting.name}."}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _plain_default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return {}
    return list(field.default) if isinstance(field.default, tuple) else field.default


def _value_schema(hint: Any, field: dataclasses.Field[Any]) -> dict[str, Any]:
    if field.metadata["choices"]:
        return {"enum": [*field.metadata["choices"], *field.metadata["synonyms"]]}
    options: list[dict[str, Any]] = []
    for kind in _kinds(hint):
        options += [schema for schema in _kind_schemas(kind, field.metadata["rule"]) if schema not in options]
    if field.default is None and {"type": "null"} not in options:
        options.append({"type": "null"})
    return options[0] if len(options) == 1 else {"anyOf": options}


def _kind_schemas(kind: Any, rule: Rule | None) -> list[dict[str, Any]]:
    """The schemas of one type; numbers may be text, and a list of one item may be written without brackets."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind in (int, float):
        number = {"type": "integer" if kind is int else "number", **_bounds(rule)}
        return [number, {"type": "string", "pattern": _NUMBER}]
    if origin is dict:
        values = [schema for value in _kinds(args[1]) for schema in _kind_schemas(value, None)]
        return [{"type": "object", "additionalProperties": {"anyOf": values}}]
    if origin is tuple:
        items = [schema for item in _kinds(args[0]) for schema in _kind_schemas(item, None)]
        array = {"type": "array", "items": items[0] if len(items) == 1 else {"anyOf": items}}
        return [array] if dataclasses.is_dataclass(args[0]) else [array, *items]
    if dataclasses.is_dataclass(kind):
        return [{"$ref": f"#/$defs/{_REFERENCES[kind]}"}]
    if origin is typing.Literal:
        return [{"enum": list(args)}]
    if kind is Any:
        return [{}]
    return [{"type": {str: "string", bool: "boolean", type(None): "null"}[kind]}]


def _bounds(rule: Rule | None) -> dict[str, float]:
    found = re.findall(r"(at least|at most|above|below) (\S+)", rule.text) if rule else []
    assert bool(found) == bool(rule), f"{rule} has no schema"
    return {_BOUNDS[word]: json.loads(number) for word, number in found}


def _one_of(name: str, cls: type) -> dict[str, Any]:
    """A schema in which exactly one spelling of a required setting is given."""
    return {"oneOf": [{"required": [spelling]} for spelling in (name, *_named(cls, name).aliases)]}


def _named(cls: type, name: str) -> Setting:
    return next(setting for setting in settings_of(cls) if setting.name == name)


if __name__ == "__main__":
    print(markdown(), end="")
