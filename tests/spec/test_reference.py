"""The configuration reference: complete, true to the loader, and the same as the committed page."""

import re
from pathlib import Path
from typing import Any

import pytest

from weft.errors import ConfigError
from weft.spec import AdapterSpec, JobSpec, RunSpec, run_from_mapping
from weft.spec.fields import field_names
from weft.spec.reference import json_schema, markdown, sections, settings_of

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_page_when_compared_with_the_specs_then_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == markdown(), "run: python -m weft.spec.reference > docs/configuration.md"


def test_sections_when_listed_then_name_every_spelling_of_every_setting():
    for section, cls in zip(sections(), (RunSpec, JobSpec, AdapterSpec), strict=True):
        listed = {name: s.name for s in section.settings for name in (s.name, *s.aliases)}
        assert listed == field_names(cls)
        assert all(setting.description.endswith(".") for setting in section.settings)


def test_settings_of_when_read_then_tell_values_and_defaults_in_words():
    found = {setting.name: setting for setting in (*settings_of(JobSpec), *settings_of(AdapterSpec))}
    assert found["learning_rate"].values == "number, above 0"
    assert found["learning_rate"].default == "0.0002"
    assert found["name"].is_required
    assert found["eval_data"].values == "number or list of text"
    assert found["init_lora_weights"].values == "true, false, gaussian, orthogonal"
    assert found["init_lora_weights"].default == "true"
    # A docstring of two lines becomes one.
    assert "random with a zero product" in found["init_lora_weights"].description


def matches(schema: dict[str, Any], value: Any, root: dict[str, Any]) -> bool:
    """Whether a value satisfies a schema, for the keywords ours uses."""
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
    if "$ref" in schema:
        return matches(root["$defs"][schema["$ref"].rsplit("/", 1)[-1]], value, root)
    if "enum" in schema and not any(value is item or (type(value) is str and value == item) for item in schema["enum"]):
        return False
    if "anyOf" in schema and not any(matches(option, value, root) for option in schema["anyOf"]):
        return False
    if "oneOf" in schema and sum(matches(option, value, root) for option in schema["oneOf"]) != 1:
        return False
    if not all(matches(part, value, root) for part in schema.get("allOf", [])):
        return False
    kind = schema.get("type")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind in ("integer", "number"):
        if not is_number or (kind == "integer" and float(value) != int(value)):
            return False
        low, high = schema.get("exclusiveMinimum", -1e99), schema.get("exclusiveMaximum", 1e99)
        return schema.get("minimum", -1e99) <= value and low < value < high
    if kind and not isinstance(value, kinds[kind]):
        return False
    if "pattern" in schema and not re.search(schema["pattern"], value):
        return False
    if isinstance(value, dict):
        known, other = schema.get("properties", {}), schema.get("additionalProperties", True)
        for key, item in value.items():
            below = known.get(key, other)
            if below is False or (isinstance(below, dict) and not matches(below, item, root)):
                return False
        return all(name in value for name in schema.get("required", []))
    return not isinstance(value, list) or all(matches(schema.get("items", {}), item, root) for item in value)


def run(top: dict[str, Any] | None = None, job: dict[str, Any] | None = None, **adapter: Any) -> dict[str, Any]:
    """A jobs file with some settings."""
    own = {"name": "a", "train_data": "a.jsonl", **(job or {}), **({"adapter": adapter} if adapter else {})}
    return {"base_model": "tiny", "jobs": [own], **(top or {})}


GOOD = [
    run(),
    run({"defaults": {"lr": "1e-4", "lora": {"rank": 4}}, "capacity": 4096, "report_to": "tensorboard"}),
    {"model": "tiny", "jobs": [{"name": "a", "dataset": ["a.jsonl", "b.csv"], "val_size": 0.1}]},
    run(job={"eval_data": ["x.jsonl"], "eval_steps": None, "warmup_steps": 0.5, "seed": 7}),
    run(target_modules="all-linear", init_lora_weights="gaussian", layers=[0, 1], rank_pattern={"q_proj": 4}),
    run(target_modules=["q_proj"], init=False, alpha=8.0, layers=3),
]
BAD = [
    run({"capasity": 4096}),
    run({"dtype": "float16"}),
    run({"jobs": {"name": "a"}}),
    run({"defaults": {"name": "a"}}),
    {"base_model": "tiny", "model": "tiny", "jobs": [{"name": "a", "data": "a.jsonl"}]},
    {"jobs": [{"name": "a", "data": "a.jsonl"}]},
    {"base_model": "tiny"},
    run({"jobs": [{"data": "a.jsonl"}]}),
    run(job={"learning_rate": 0}),
    run(job={"learning_rate": "fast"}),
    run(job={"max_steps": 1.5}),
    run(job={"shuffle": "yes please"}),
    run(job={"max_length": 1}),
    run(job={"learning_rate": None}),
    run(job={"adam_beta1": 1}),
    run(r=0),
    run(rang=4),
    run(init="random"),
    run(rank_pattern={"q_proj": "many"}),
]


@pytest.mark.parametrize("tree", GOOD)
def test_schema_when_the_loader_takes_a_file_then_takes_it_too(tree: dict[str, Any]):
    run_from_mapping(tree)
    assert matches(json_schema(), tree, json_schema())


@pytest.mark.parametrize("tree", BAD)
def test_schema_when_the_loader_refuses_a_value_then_refuses_it_too(tree: dict[str, Any]):
    with pytest.raises(ConfigError):
        run_from_mapping(tree)
    assert not matches(json_schema(), tree, json_schema())
