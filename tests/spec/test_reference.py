"""The configuration reference: complete, true to the loader, and the same as the committed page."""

import re
from pathlib import Path
from typing import Any

import pytest

from weft.errors import ConfigError
from weft.methods.lora.config import EvaSpec
from weft.settings import field_names
from weft.spec import AdapterSpec, JobSpec, RunSpec, run_from_mapping
from weft.spec.job import SourceSpec
from weft.spec.load_sweep import sweep_from_mapping
from weft.spec.reference import json_schema, markdown, sections, settings_of, sweep_schema, sweep_sections
from weft.spec.sweep import EarlyStopSpec, ObjectiveSpec, SweepSpec

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_page_when_compared_with_the_specs_then_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == markdown(), "run: python -m weft.spec.reference > docs/configuration.md"


def test_sections_when_listed_then_name_every_spelling_of_every_setting():
    for section, cls in zip(sections(), (RunSpec, JobSpec, SourceSpec, AdapterSpec, EvaSpec), strict=True):
        listed = {name: s.name for s in section.settings for name in (s.name, *s.aliases)}
        assert listed == field_names(cls)
        assert all(setting.description.endswith(".") for setting in section.settings)


def test_settings_of_when_read_then_describe_values_and_defaults():
    found = {setting.name: setting for setting in (*settings_of(JobSpec), *settings_of(AdapterSpec))}
    assert found["learning_rate"].values == "number, above 0"
    assert found["learning_rate"].default == "null"
    assert found["name"].is_required
    assert found["eval_data"].values == "number or list of names or mappings"
    assert found["init_lora_weights"].values.startswith("true, false, gaussian, orthogonal, pissa, ")
    assert found["init_lora_weights"].default == "true"
    # A docstring of two lines becomes one.
    assert "random A and B with a zero product" in found["init_lora_weights"].description


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
    run({"capacity": "auto"}),
    run({"microbatch_tokens": "4096"}),
    {"model": "tiny", "jobs": [{"name": "a", "dataset": ["a.jsonl", "b.csv"], "val_size": 0.1}]},
    run(job={"learning_rate": None}),
    run(job={"eval_data": ["x.jsonl"], "eval_steps": None, "warmup_steps": 0.5, "seed": 7}),
    run(target_modules="all-linear", init_lora_weights="gaussian", layers=[0, 1], rank_pattern={"q_proj": 4}),
    run(target_modules=["q_proj"], init=False, alpha=8.0, layers=3),
]
BAD = [
    run({"capasity": 4096}),
    run({"capacity": "most"}),
    run({"capacity": 1}),
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
    run(job={"weight_decay": None}),
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


def sweep(**settings: Any) -> dict[str, Any]:
    """A sweep file with some settings; None takes one away."""
    job = {"train_data": "a.jsonl", "eval_data": 0.1}
    tree = {"base_model": "tiny", "job": job, "space": {"lr": [1e-3, 2e-3]}, **settings}
    return {key: value for key, value in tree.items() if value is not None}


JOB = sweep()["job"]
GOOD_SWEEPS = [
    sweep(),
    sweep(job=None, base={**JOB, "lora": {"alpha": "2r"}}, n_trials=4, early_stopping=False, objective="perplexity"),
    sweep(space=None, parameters={"r": {"min": 4, "max": 8, "step": 2}}, early_stop={"rule": "median", "eta": 2}),
    sweep(objective={"metric": "accuracy", "choices": ["a", "b"]}, sampler="random", max_seconds=1.5, capacity=4096),
]
BAD_SWEEPS = [
    sweep(space=None),
    sweep(base_model=None),
    sweep(trails=3),
    sweep(trials=0),
    sweep(sampler="best"),
    sweep(jobs=[{"name": "a"}], job=None, space={"lr": [1]}),
    sweep(early_stop="never"),
    sweep(early_stop={"rule": "asha", "factor": 1}),
    sweep(objective={"metrik": "eval_loss"}),
    sweep(job={**JOB, "name": "a"}),
    sweep(job={**JOB, "adapter": {"lora_alpha": "twice"}}),
]


@pytest.mark.parametrize("tree", GOOD_SWEEPS)
def test_schema_of_sweeps_when_the_loader_takes_a_file_then_takes_it_too(tree: dict[str, Any]):
    sweep_from_mapping(tree, base_dir=Path())
    assert matches(sweep_schema(), tree, sweep_schema())


@pytest.mark.parametrize("tree", BAD_SWEEPS)
def test_schema_of_sweeps_when_the_loader_refuses_a_value_then_refuses_it_too(tree: dict[str, Any]):
    with pytest.raises(ConfigError):
        sweep_from_mapping(tree, base_dir=Path())
    assert not matches(sweep_schema(), tree, sweep_schema())


def test_sections_of_sweeps_when_listed_then_name_what_a_jobs_file_does_not_have():
    names = [{s.name for s in section.settings} for section in sweep_sections()]
    own = field_names(SweepSpec).keys() - field_names(RunSpec).keys()
    assert {field_names(SweepSpec)[name] for name in own} <= names[0] and "jobs" not in names[0]
    assert names[1:] == [set(field_names(cls).values()) for cls in (ObjectiveSpec, EarlyStopSpec)]
    assert all(setting.description.endswith(".") for section in sweep_sections() for setting in section.settings)
