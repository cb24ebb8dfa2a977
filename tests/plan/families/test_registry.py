"""Descriptions of decoders: what they make of configurations, and that they need no torch."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from weft.plan.cost.shape import SHAPES
from weft.plan.decoder import SEPARATE, LayerForm, LayerKind, Rotary, kept_tensors, moved_names
from weft.plan.families import FAMILIES, LINEARS, describe, is_described, why_unsupported

CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
}
SLIDING = ["sliding_attention", "full_attention"]


def described(family: str, **settings: Any) -> Any:
    return describe({"model_type": family, **CONFIG, **settings}, "mine")


@pytest.mark.parametrize("family", FAMILIES)
def test_description_when_read_then_has_every_layer_and_its_linears(family):
    decoder = described(family)
    assert (decoder.sizes.name, decoder.sizes.hidden, len(decoder.layers)) == ("mine", 64, 2)
    assert all(0 <= layer.rotary < len(decoder.rotaries) for layer in decoder.layers)
    assert set(decoder.sizes.linears) <= set(LINEARS)
    assert sum(num_out * num_in for num_out, num_in in decoder.sizes.linears.values()) == 64 * (128 + 64 + 3 * 128)


def test_description_when_the_family_is_unknown_then_it_is_taken_for_llamas_like():
    assert described("olmo").sizes.form == LayerForm()
    inner = {"text_config": {"model_type": "qwen3", **CONFIG}}
    assert describe(inner).sizes.form.has_head_norms


@pytest.mark.parametrize(
    ("family", "settings", "windows"),
    [
        ("llama", {"sliding_window": 8}, [None, None]),
        ("mistral", {"sliding_window": 8}, [8, 8]),
        ("mistral", {"sliding_window": None}, [None, None]),
        ("qwen2", {"sliding_window": 8, "layer_types": SLIDING}, [8, None]),
        ("qwen3", {}, [None, None]),
        ("phi3", {"sliding_window": 2047}, [2047, 2047]),
        ("phi3", {"sliding_window": 262_144}, [None, None]),
        ("gemma3_text", {"sliding_window": 1024, "layer_types": SLIDING}, [1024, None]),
    ],
)
def test_windows_when_a_family_has_them_then_on_its_layers_and_never_wider_than_a_sample(family, settings, windows):
    assert [layer.window for layer in described(family, **settings).layers] == windows


def test_gemma_when_described_then_each_kind_of_layer_has_its_own_positions():
    rope = {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {"rope_type": "default"}}
    decoder = described("gemma3_text", rope_parameters=rope, layer_types=SLIDING, query_pre_attn_scalar=64)
    assert decoder.rotaries == (Rotary("full_attention", "linear"), Rotary("sliding_attention"))
    assert decoder.layers == (LayerKind(None, 1), LayerKind(None, 0))
    assert (decoder.attention_scale, decoder.embedding_scale) == (0.125, 8.0)
    only = described("gemma3_text", rope_parameters=rope, layer_types=["full_attention"] * 2)
    assert len(only.rotaries) == 1


def test_smollm_when_described_then_some_layers_have_no_positions():
    assert [layer.rotary for layer in described("smollm3", no_rope_layers=[1, 0]).layers] == [0, 1]
    assert described("smollm3").rotaries == (Rotary(), Rotary(is_none=True))


def test_olmo_when_described_then_it_norms_only_what_is_added_and_all_heads_at_once():
    form = described("olmo3", layer_types=SLIDING, sliding_window=8).sizes.form
    assert (form.norms.before_attention, form.norms.before_mlp, form.head_norm) == (None, None, "all")
    assert form.norms.names == ("post_attention_layernorm", "post_feedforward_layernorm")


def test_ministral_when_described_then_queries_are_stretched_by_position():
    rope = {"rope_type": "yarn", "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16}
    assert described("ministral3", rope_parameters=rope).rotaries[0].stretch == (0.1, 16)


def test_granite_when_described_then_has_its_factors():
    factors = {"attention_multiplier": 0.25, "embedding_multiplier": 12.0, "residual_multiplier": 0.5}
    for family in ("granite", "granitemoehybrid"):
        decoder = described(family, **factors)
        assert (decoder.attention_scale, decoder.input_scale, decoder.residual_scale) == (0.25, 12.0, 0.5)


@pytest.mark.parametrize(
    "settings", [{"layer_types": ["full_attention", "linear_attention"]}, {"num_local_experts": 4}, {}]
)
def test_granite_4_when_it_has_states_or_experts_then_the_fast_path_refuses(settings):
    config = {"model_type": "granitemoehybrid", **CONFIG, **settings}
    reason = "only dense granitemoehybrid models with attention in every layer have kernels"
    assert why_unsupported(config) == (reason if settings else None)
    assert is_described(config) == (not settings)


def test_phi_when_described_then_one_module_is_a_whole_site():
    sizes = described("phi3", rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.75}).sizes
    assert sizes.linears == {
        "qkv_proj": (128, 64),
        "o_proj": (64, 64),
        "gate_up_proj": (256, 64),
        "down_proj": (64, 128),
    }
    assert [tensor.width for tensor in kept_tensors(sizes, 16) if tensor.name == "s_qkv"] == [16]


def test_moved_when_listed_then_only_what_a_family_has():
    plain, normed = (moved_names(described(family).sizes) for family in ("llama", "gemma3_text"))
    assert plain == ("x_TD", "mid_TD", "gu_TJ")
    assert set(normed) - set(plain) == {"y_TD", "y_mid_TD", "raw_qkv_TE"}


def test_shapes_of_the_bench_when_described_then_of_families_on_the_fast_path():
    assert {str(shape.config().model_type) for shape in SHAPES.values()} == set(FAMILIES)
    assert describe(SHAPES["llama-3.1-8b"].config().to_dict()).sizes.form.sites == SEPARATE


def test_families_when_imported_then_bring_no_torch():
    code = "import sys, weft.plan.families, weft.plan.decoder; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
