"""Layers with states, experts or unequal heads on stages and shards: the bits of one device; the rest is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import transformers
from covering import slow
from staged_models import assert_same_answers, staged_executor
from tiny_families import FAMILIES, plain_model
from tiny_models import assert_same_bits, finish, random_backbone, small_job, submit, train
from tiny_shards import spread

from weft.adapters.frozen import KINDS, quantise
from weft.engine.engine import Engine
from weft.errors import ModelError
from weft.model.backbone import Backbone
from weft.model.divided import why_not_divisible
from weft.model.resolve import resolve
from weft.parallel.stages.load_stages import find_parts
from weft.plan.cost.types import LinearCost
from weft.plan.pipeline.build import PipelinePlanner, Schedule
from weft.plan.spread import SpreadPlanner
from weft.plan.weights import FINAL_NORMS
from weft.spec import AdapterSpec, BackboneSpec

NAMES = ["qwen3_5_text", "qwen3_5_moe_text", "lfm2", "granitemoehybrid_mamba", "mamba2", "gemma4_31b"]
JOBS = [("a", 0), ("b", 1)]


def jobs() -> list[Any]:
    """On all linears, those of mixers too."""
    adapter = AdapterSpec(r=4, lora_dropout=0.1)
    made = [small_job(name, seed, max_steps=3, max_grad_norm=0.05) for name, seed in JOBS]
    return [(replace(spec, adapter=adapter), data) for spec, data in made]


@pytest.mark.parametrize("name", NAMES)
def test_stages_beside_a_whole_replica_when_layers_have_states_then_have_the_bits_of_one_device(name):
    expected = train(random_backbone(name), jobs(), capacity=48)
    planner = SpreadPlanner((2, 1), (LinearCost(), LinearCost()))
    engine = Engine(staged_executor(name, (1, 1), (2,)), capacity=48, planner=planner)
    submit(engine, *jobs())
    for job, outcome in finish(engine).items():
        assert_same_bits(outcome, expected[job])


def test_answers_when_states_are_on_two_stages_then_those_of_one_device():
    whole = Engine(random_backbone("qwen3_5_text"), capacity=48)
    staged = Engine(staged_executor("qwen3_5_text", (1, 1)), capacity=48, planner=PipelinePlanner(Schedule.EAGER, 2))
    for engine, tokenizer in ((whole, whole.executor.backbone.tokenizer), (staged, staged.executor.tokenizer)):
        tokenizer.decode = lambda tokens, **_: str(tokens)
        submit(engine, *jobs())
        finish(engine)
    assert_same_answers(whole, staged, [job for job, _ in JOBS])


def stored_as(kind: str, name: str, **sizes: int) -> Backbone:
    backbone = random_backbone(name, **sizes)
    for linear in backbone.linears.values():
        linear.frozen = quantise(linear.weight, kind)
    return backbone


@pytest.mark.parametrize("name", NAMES)
def test_shards_however_weights_are_stored_then_have_the_bits_of_the_whole(name):
    """More layers than there are buffers, of unequal sizes."""
    layers = {"layer_types": FAMILIES[name][1]["layer_types"] * 2} if "layer_types" in FAMILIES[name][1] else {}
    (spec, data), *_ = jobs()
    job = [(replace(spec, max_steps=1), data)]
    for kind in KINDS if name == "qwen3_5_text" else ("none", "nf4"):
        whole, shared = (stored_as(kind, name, num_hidden_layers=4, **layers) for _ in range(2))
        expected = train(whole, job, capacity=48)
        assert_same_bits(train(spread(shared), job, capacity=48)["a"], expected["a"])


def test_layouts_when_layers_cannot_be_divided_then_one_sentence(tmp_path):
    plain_model("falcon_h1").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"is a falcon_h1 model; stages and shards are for those of llama, .*, lfm2"):
        find_parts(resolve(BackboneSpec(str(tmp_path), device="cpu")), 2)
    plain_model("gemma4_e2b").save_pretrained(tmp_path)
    reason = "have embeddings of their own and reuse keys and values of earlier ones; they stay on one device"
    with pytest.raises(ModelError, match=f"is a gemma4_text model whose layers {reason}"):
        find_parts(resolve(BackboneSpec(str(tmp_path), device="cpu")), 2)
    for name in NAMES:
        kind, settings = FAMILIES[name]
        config = getattr(transformers, f"{kind}Config")(**settings)
        assert config.model_type in FINAL_NORMS
        found = why_not_divisible(config.to_dict(), 2)
        assert found is not None and found.startswith(f"is a {config.model_type} model, whose layers cannot be divided")
        assert found.endswith("stages:N and shards:N take this one")


@pytest.mark.parametrize(
    "name", ["qwen3_moe", slow("gemma4_moe"), slow("gpt_oss"), slow("granitemoe"), slow("deepseek_v3")]
)
def test_stages_when_adapters_are_on_routed_experts_then_have_the_bits_of_one_device(name):
    kinds = {"a": "full", "b": "shared"}
    given = [(replace(spec, adapter=AdapterSpec(r=2, experts=kinds[spec.name])), data) for spec, data in jobs()]
    expected = train(random_backbone(name), given, capacity=48)
    planner = SpreadPlanner((2, 1), (LinearCost(), LinearCost()))
    engine = Engine(staged_executor(name, (1, 1), (2,)), capacity=48, planner=planner)
    submit(engine, *given)
    for job, outcome in finish(engine).items():
        assert_same_bits(outcome, expected[job])
