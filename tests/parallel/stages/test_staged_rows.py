"""Rows of tokens have the bits of one device under every layout: those at both ends of a model too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import each_value
from staged_models import staged_executor, train_until
from tensor_models import tensor_executor
from test_spread import engine_of
from test_tensor import MODEL, assert_near
from tiny_models import Job, assert_same_bits, finish, job_spec, random_backbone, random_data, submit, train

from weft.engine.engine import Engine
from weft.errors import ConfigError
from weft.objectives.preference import Dpo
from weft.plan.pipeline.build import PipelinePlanner, Schedule
from weft.spec import AdapterSpec
from weft.store.peft_files import write_adapter

LAYERS = 3
SOME: dict[str, Any] = {"trainable_token_indices": (30, 9, 4, 5)}
UNTIED: list[dict[str, Any]] = [
    {"trainable_token_indices": {"embed_tokens": (9, 4), "lm_head": (4, 7, 8)}},
    {"modules_to_save": ("embed_tokens", "lm_head")},
]
TIED: list[dict[str, Any]] = [SOME, {"modules_to_save": ("lm_head",)}]


def jobs(rows: list[dict[str, Any]], **settings: Any) -> list[Job]:
    """One with each of these rows, clipped, and one that has none."""
    step: dict[str, Any] = {"max_steps": 3, "max_grad_norm": 0.3, "learning_rate": 3e-2, "weight_decay": 0.1}
    adapters = [{"r": 3, "lora_dropout": 0.1, **own} for own in (*rows, {})]
    return [
        (job_spec(f"job{seed}", seed=seed, adapter=own, **{**step, **settings}), random_data(seed, num_samples=6))
        for seed, own in enumerate(adapters)
    ]


def staged(name: str, sizes: tuple[int, ...]) -> Engine:
    planner = PipelinePlanner(Schedule.EAGER, len(sizes))
    return Engine(staged_executor(name, sizes), capacity=48, planner=planner)


@pytest.mark.parametrize(
    ("model", "settings"),
    each_value([("llama_tied", TIED), ("llama_bias", UNTIED)], [{"optim": "adafactor"}, {"ema_decay": 0.5}]),
)
def test_rows_when_the_model_is_cut_then_have_the_bits_of_one_device(model, settings):
    name, rows = model
    many = jobs(rows, **settings)
    expected = train(random_backbone(name, num_hidden_layers=LAYERS), many, capacity=48)
    engine = staged(name, (1, 1, 1) if "optim" in settings else (1, 2))
    submit(engine, *many)
    for job, outcome in finish(engine).items():
        assert_same_bits(outcome, expected[job])


@pytest.mark.parametrize(("name", "rows"), [("llama_tied", TIED), ("llama_bias", UNTIED)])
def test_rows_when_sums_are_free_over_unlike_replicas_then_have_the_bits_of_one_device(name, rows):
    many = jobs(rows, gradient_sum="any_order")
    expected = train(random_backbone(name, num_hidden_layers=LAYERS), many, capacity=48)
    engine = engine_of((3,), (1, 2), seed=2, name=name)
    submit(engine, *many)
    for job, outcome in finish(engine).items():
        assert_same_bits(outcome, expected[job])


@pytest.mark.parametrize("sizes", [(2,), (1, 1)])
def test_rows_when_devices_share_layers_then_end_near_those_of_one_device(sizes):
    many = jobs([SOME], adam_epsilon=1e-3)
    expected = train(random_backbone("llama_tied", num_hidden_layers=2, **MODEL), many, capacity=48)
    executor = tensor_executor("llama_tied", 2, sizes, **MODEL)
    engine = Engine(executor, capacity=48, planner=PipelinePlanner(Schedule.ONE_F_ONE_B, len(sizes)))
    submit(engine, *many)
    for job, outcome in finish(engine).items():
        assert_near(outcome, expected[job])
    engine.close()


def test_reference_when_it_has_rows_then_has_its_results_of_one_device(tmp_path):
    """Rows that are not those it started with, at both ends."""
    backbone = random_backbone("llama_tied", num_hidden_layers=LAYERS)
    adapter = backbone.new_adapter(AdapterSpec(r=3, **SOME), seed=9)
    generator = torch.Generator().manual_seed(5)
    adapter.put({name: x + 0.2 * torch.randn(x.shape, generator=generator) for name, x in adapter.flat().items()})
    rows, names = backbone.embeddings, list(adapter.modules)
    spec, tensors = rows.named(adapter.spec), adapter.tensors()
    write_adapter(tmp_path / "a", spec, tensors, base_model="x", target_names=names, row_modules=rows.paths)
    data = random_data(1, num_samples=6)
    pairs = replace(data, train=replace(data.train, objective=Dpo(0.4)))
    job = job_spec("pairs", adapter={"r": 3}, max_steps=2, global_batch_size=3, reference=str(tmp_path / "a")), pairs
    expected = train(random_backbone("llama_tied", num_hidden_layers=LAYERS), [job], capacity=96)
    engine = staged("llama_tied", (1, 2))
    submit(engine, job)
    assert_same_bits(finish(engine)["pairs"], expected["pairs"])


def test_run_when_it_goes_on_in_other_stages_then_files_and_state_are_those_of_one_device(tmp_path):
    many = jobs([SOME], early_stopping_patience=5, eval_data=2, eval_steps=1)
    many = [(spec, random_data(seed, num_eval=2)) for seed, (spec, _) in enumerate(many)]
    train_until(whole(), tmp_path / "one", 3, many)
    for until, engine in ((1, staged("llama_tied", (1, 2))), (2, whole()), (3, staged("llama_tied", (2, 1)))):
        train_until(engine, tmp_path / "moved", until, many)
    files = [path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*") if is_written(path)]
    assert len(files) >= 6
    for path in files:
        assert (tmp_path / "one" / path).read_bytes() == (tmp_path / "moved" / path).read_bytes(), path


def is_written(path: Path) -> bool:
    return path.suffix == ".safetensors" or path.name == "adapter_config.json"


def whole() -> Engine:
    return Engine(random_backbone("llama_tied", num_hidden_layers=LAYERS), capacity=48)


@pytest.mark.parametrize(("layer", "end"), [(2, "first"), (0, "last")])
def test_rows_when_their_stage_has_no_module_of_the_adapter_then_the_error_names_them(layer, end):
    engine = staged("llama_tied", (1, 2))
    spec = job_spec("job", adapter={"r": 3, "layers_to_transform": (layer,), **SOME})
    with pytest.raises(ConfigError, match=f"its rows of tokens are on the {end} stage, where its adapter has no"):
        engine.submit(spec, random_data(0))
