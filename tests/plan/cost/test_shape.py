"""Shapes of backbones."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import ConfigError, ModelError
from weft.plan.cost.shape import LINEARS, SHAPES, ModelShape, chosen_linears, find_shape, stage_layers

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 256,
}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.2-1b", 1_235_814_400),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-8b", 8_190_735_360),
        ("gemma-3-4b", 3_880_263_168),
        ("phi-4-mini", 3_836_021_760),
        ("tinyllama-1.1b", 1_100_048_384),
    ],
)
def test_parameters_when_a_published_model_is_counted_then_equal_its_own_count(name, parameters):
    """Tied heads, biases, head norms, norms of results and joined linears included."""
    shape = ModelShape.from_config(SHAPES[name].config().to_dict(), name)
    assert shape.num_parameters == parameters
    assert shape.num_layers * shape.layer_weights + shape.head_weights == SHAPES[name].num_product_weights


def test_from_config_when_sizes_are_left_out_then_transformers_defaults_count():
    shape = ModelShape.from_config(CONFIG)
    assert (shape.num_kv_heads, shape.head_size, shape.tied, shape.name) == (4, 16, False, "llama")
    assert ModelShape.from_config({"text_config": CONFIG}) == shape


@pytest.mark.parametrize(("key", "value"), [("vocab_size", None), ("hidden_size", "64"), ("num_hidden_layers", 0)])
def test_from_config_when_a_size_is_wrong_then_the_error_names_it(key, value):
    with pytest.raises(ModelError, match=f"llama: {key} is"):
        ModelShape.from_config({**CONFIG, key: value})


def test_adapter_parameters_when_counted_then_follow_rank_and_targets():
    shape = ModelShape.from_config(SHAPES["llama-3.1-8b"].config().to_dict())
    assert shape.adapter_parameters(16) == 41_943_040
    assert shape.adapter_parameters(32) == 2 * 41_943_040
    assert shape.adapter_parameters(8, ("v_proj", "q_proj")) == 32 * 8 * (8192 + 5120)


def test_attention_flop_when_a_sample_is_whole_then_costs_its_square():
    shape = ModelShape.from_config(CONFIG)
    assert shape.attention_flop([10]) == 4 * 64 * 55
    assert shape.attention_flop([5, 5]) == 4 * 64 * 30


def test_chosen_linears_when_names_are_given_then_layer_order_and_typos_refused():
    assert chosen_linears("all-linear") == LINEARS
    assert chosen_linears(("down_proj", "q_proj")) == ("q_proj", "down_proj")
    with pytest.raises(ConfigError, match="Did you mean q_proj"):
        chosen_linears(("q_porj",))


@given(st.integers(1, 100), st.integers(1, 100))
def test_stage_layers_when_split_then_even_and_none_lost(num_layers, num_stages):
    if num_stages > num_layers:
        with pytest.raises(ConfigError, match="every stage needs a layer"):
            stage_layers(num_layers, num_stages)
        return
    found = stage_layers(num_layers, num_stages)
    assert sum(found) == num_layers and len(found) == num_stages
    assert max(found) - min(found) <= 1 and list(found) == sorted(found, reverse=True)


def test_stage_layers_when_chosen_then_they_count_and_must_add_up():
    assert stage_layers(32, 3, (12, 11, 9)) == (12, 11, 9)
    for chosen in ((16, 16), (12, 11, 10), (20, 12, 0)):
        with pytest.raises(ConfigError, match="for 32 layers on 3 stages"):
            stage_layers(32, 3, chosen)


def test_cost_package_when_imported_then_brings_neither_torch_nor_scipy():
    code = (
        "import sys, weft.plan.cost.analytic, weft.plan.cost.profile;"
        "print([m for m in ('torch', 'scipy', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_find_shape_when_misspelt_then_suggests():
    with pytest.raises(ConfigError, match=r"no shape 'llama-3.1-8'.*Did you mean llama-3.1-8b\?"):
        find_shape("llama-3.1-8")
