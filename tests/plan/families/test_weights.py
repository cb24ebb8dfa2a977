"""Weights counted without modules: those that transformers' own models have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tiny_families import FAMILIES
from transformers import AutoModelForCausalLM

from weft.errors import ModelError
from weft.plan.cost.memory import MemoryModel
from weft.plan.cost.shape import ModelShape
from weft.plan.weights import WEIGHTS, estimated_sizes

CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3_5Text": {},
    "Qwen3_5MoeText": {},
    "Qwen3Next": {},
    "Lfm2": {},
    "Lfm2Moe": {"layer_types": ["conv", "full_attention"] * 16},
    "GraniteMoeHybrid": {"layer_types": ["mamba", "mamba", "attention", "mamba"] * 8},
    "NemotronH": {"layers_block_type": ["mamba", "moe", "mamba", "attention", "mlp"] * 4},
    "Bamba": {"attn_layer_indices": [9, 18]},
    "FalconH1": {},
    "Mamba2": {},
    "Mixtral": {},
    "Qwen2Moe": {"decoder_sparse_step": 2, "mlp_only_layers": [3]},
    "Qwen3Moe": {"head_dim": 128},
    "Olmoe": {},
    "GraniteMoe": {},
    "GptOss": {},
    "DeepseekV3": {"num_hidden_layers": 8},
    "Glm4Moe": {},
    "Glm4MoeLite": {"q_lora_rank": None},
    "Gemma4Text": {"hidden_size_per_layer_input": 256, "num_kv_shared_layers": 10, "use_double_wide_mlp": True},
    "Gemma4Text 31B": {"attention_k_eq_v": True, "num_global_key_value_heads": 2},
    "Gemma4Text MoE": {"enable_moe_block": True, "num_experts": 64, "top_k_experts": 8, "moe_intermediate_size": 704},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_when_estimated_then_within_a_thousandth_of_the_models(name):
    config = getattr(transformers, f"{name.partition(' ')[0]}Config")(**CONFIGS[name])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = ModelShape.from_config(config.to_dict())
    assert shape.num_parameters == pytest.approx(sum(p.numel() for p in model.parameters()), rel=1e-3)
    assert shape.num_layers == len(model.base_model.layers)
    assert config.model_type in WEIGHTS


def test_idle_experts_when_a_token_uses_few_then_they_count_as_memory_only():
    shape = ModelShape.from_config(transformers.Qwen3_5MoeTextConfig().to_dict())
    assert shape.num_layers * shape.layer_weights + shape.head_weights == pytest.approx(2.95e9, rel=0.01)
    assert MemoryModel(shape).weight_bytes() == 2 * shape.num_parameters


@pytest.mark.parametrize("name", FAMILIES)
def test_shape_of_any_family_when_read_then_a_plan_can_be_made(name):
    kind, settings = FAMILIES[name]
    shape = ModelShape.from_config(getattr(transformers, f"{kind}Config")(**settings).to_dict())
    assert (shape.hidden, shape.num_heads) == (32, 4) or name == "llama_odd" or name == "mamba2"
    assert shape.ffn > 0 and shape.num_layers in (2, 4)


def test_sizes_when_the_configuration_lacks_one_then_a_sentence():
    with pytest.raises(ModelError, match="mine: hidden_size is missing in its configuration"):
        estimated_sizes({"model_type": "qwen3_5_text"}, "mine")
