"""The estimate by which admission and plans count a microbatch on the reference path is what autograd keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tiny_models import random_backbone, random_sample

from weft.engine.execute.memory import measure
from weft.model.packed import SlotSample, pack_samples
from weft.spec import AdapterSpec

WIDE = {"hidden_size": 128, "num_experts_per_tok": 4, "moe_intermediate_size": 64}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**WIDE, "num_experts": 8, "head_dim": 32},
    "mixtral": {"hidden_size": 128, "intermediate_size": 192, "num_local_experts": 8},
    "olmoe": {**WIDE, "num_experts": 8},
    "granitemoe": {"hidden_size": 128, "intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 4},
    "lfm2_moe": {**WIDE, "num_experts": 8},
    "gpt_oss": {"hidden_size": 128, "intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 4},
    "gemma4_moe": {**WIDE, "num_experts": 8, "top_k_experts": 4, "head_dim": 32, "global_head_dim": 64},
    "gemma4_31b": {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "global_head_dim": 64},
    "gemma4_e2b": {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "global_head_dim": 64},
    "glm4_moe_lite": {
        **WIDE,
        "n_routed_experts": 8,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 24,
        "v_head_dim": 32,
    },
    "llama": {"hidden_size": 128, "intermediate_size": 256},
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_moe_text": {**WIDE, "num_experts": 8, "linear_key_head_dim": 32, "linear_value_head_dim": 32},
    "nemotron_h": {**WIDE, "n_routed_experts": 8},
}


def estimate_over_kept(name: str, experts: str, length: int, settings: dict[str, Any]) -> float:
    backbone = random_backbone(name, **settings)
    spec = AdapterSpec(r=2, experts=experts)
    slot = backbone.attach(backbone.new_adapter(spec, 0))
    samples = [SlotSample(random_sample(np.random.default_rng(n), length, high=60), slot) for n in range(128 // length)]
    batch = pack_samples(samples, 128, backbone.device)
    kept = measure(backbone, lambda: backbone.forward_backward(batch, 128)).held_bytes
    return backbone.activation_bytes(128, [spec]) / kept


@pytest.mark.parametrize("experts", ["none", "full"])
@pytest.mark.parametrize("name", MIXTURES)
def test_activation_bytes_when_experts_are_frozen_or_trained_then_are_those_kept(name, experts):
    if experts == "full" and not any("expert" in key for key in MIXTURES[name]):
        experts = "none"
    # Short samples: a CPU keeps the scores of attention, which kernels do not.
    assert 1 <= estimate_over_kept(name, experts, 8, MIXTURES[name]) < 1.2


@pytest.mark.parametrize("name", HYBRIDS)
def test_activation_bytes_when_mixers_have_states_then_are_no_less_than_those_kept(name):
    """What a mixer needs on the way back is a bound for any of its layers."""
    assert 1 <= estimate_over_kept(name, "full", 64, HYBRIDS[name]) < 2
