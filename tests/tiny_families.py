"""Tiny random models of every family, by transformers alone: nothing here imports Weft."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

VOCABULARY = 61
POSITIONS = 128
SETTINGS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_OPT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
    "init_std": 0.2,
    "pad_token_id": 1,
    "dropout": 0.0,
}
_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": POSITIONS,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT_NEO = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 2,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 4,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_NEOX = {k: v for k, v in SETTINGS.items() if k != "num_key_value_heads"}
_FALCON = {**_NEOX, "alibi": False, "bias": True}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_GEMMA = {**SETTINGS, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 32,
}

_FACTORS = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 3.0,
    "logits_scaling": 6.0,
    "residual_multiplier": 0.5,
}
MINISTRAL = {
    **SETTINGS,
    "head_dim": 12,
    "rope_parameters": {**_YARN, "original_max_position_embeddings": 4, "llama_4_scaling_beta": 0.7},
}
GEMMA4 = {
    **SETTINGS,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
}
_GEMMA4_E2B = {
    **GEMMA4,
    "initializer_range": 0.3,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 16,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
}
_GPT_OSS = {
    **SETTINGS,
    "head_dim": 8,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rope_parameters": {**_YARN, "truncate": False},
}
_SIGMOID = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_DEEPSEEK = {
    **SETTINGS,
    **_SIGMOID,
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 8,
}
_GRANITE4 = {
    **SETTINGS,
    **_FACTORS,
    "layer_types": ["full_attention"] * 2,
    "num_local_experts": 0,
    "shared_intermediate_size": 48,
    "mamba_n_heads": 4,
}
_ONE_OF_EACH = ["linear_attention", "full_attention"]
_GATED_DELTA = {
    "head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": _ONE_OF_EACH,
    "rms_norm_eps": 1e-3,
}
"""With so few key numbers a head's output is often nearly zero: its norm would multiply rounding in every library."""
_SHARED_EXPERT = {**_EXPERTS, "shared_expert_intermediate_size": 40}
_LFM2 = {**SETTINGS, "block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention"]}
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_chunk_size": 8,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SETTINGS),
    "llama_bias": ("Llama", {**SETTINGS, "attention_bias": True, "mlp_bias": True}),
    "llama_tied": ("Llama", {**SETTINGS, "tie_word_embeddings": True}),
    "llama_odd": (
        "Llama",
        {**SETTINGS, "hidden_size": 36, "intermediate_size": 50, "num_attention_heads": 3, "num_key_value_heads": 3},
    ),
    "llama_llama3": ("Llama", {**SETTINGS, "rope_parameters": _LLAMA3}),
    "llama_yarn": ("Llama", {**SETTINGS, "rope_parameters": _YARN}),
    "llama_linear": (
        "Llama",
        {**SETTINGS, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "llama_dynamic": ("Llama", {**SETTINGS, "max_position_embeddings": 32, "rope_parameters": _DYNAMIC}),
    "llama_relu": ("Llama", {**SETTINGS, "hidden_act": "relu"}),
    "mistral": ("Mistral", {**SETTINGS, "sliding_window": 4}),
    "qwen2": ("Qwen2", SETTINGS),
    "qwen2_sliding": ("Qwen2", {**SETTINGS, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {**SETTINGS, "head_dim": 12}),
    "gemma2": ("Gemma2", {**_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3_text": ("Gemma3Text", {**_GEMMA, "layer_types": ["sliding_attention", "full_attention"]}),
    "phi3": ("Phi3", SETTINGS),
    "phi3_partial": (
        "Phi3",
        {**SETTINGS, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}},
    ),
    "phi3_longrope": ("Phi3", {**SETTINGS, "original_max_position_embeddings": 32, "rope_parameters": _LONGROPE}),
    "opt": ("OPT", _OPT),
    "opt_projected": ("OPT", {**_OPT, "word_embed_proj_dim": 20, "do_layer_norm_before": False}),
    "gpt_neox": ("GPTNeoX", {**_NEOX, "rotary_pct": 0.5}),
    "granite": ("Granite", {**SETTINGS, **_FACTORS}),
    "granitemoehybrid": ("GraniteMoeHybrid", {**_GRANITE4, "position_embedding_type": "rope"}),
    "granitemoehybrid_nope": ("GraniteMoeHybrid", _GRANITE4),
    "smollm3": ("SmolLM3", {**SETTINGS, "no_rope_layer_interval": 2}),
    "olmo3": ("Olmo3", {**SETTINGS, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}),
    "ministral3": ("Ministral3", MINISTRAL),
    "cohere": ("Cohere", {**SETTINGS, "logit_scale": 0.3, "use_qk_norm": True}),
    "cohere2": ("Cohere2", {**SETTINGS, "logit_scale": 0.3, "sliding_window": 4, "sliding_window_pattern": 2}),
    "gpt2": ("GPT2", _GPT2),
    "gpt_neo": ("GPTNeo", _GPT_NEO),
    "gptj": ("GPTJ", {**_GPT2, "rotary_dim": 4}),
    "codegen": ("CodeGen", {**_GPT2, "rotary_dim": 4}),
    "falcon": ("Falcon", _FALCON),
    "falcon_grouped": ("Falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "mixtral": ("Mixtral", {**SETTINGS, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": ("Qwen2Moe", {**SETTINGS, **_EXPERTS, "shared_expert_intermediate_size": 40}),
    "qwen3_moe": ("Qwen3Moe", {**SETTINGS, **_EXPERTS, "head_dim": 12}),
    "olmoe": ("Olmoe", {**SETTINGS, "num_experts": 4, "num_experts_per_tok": 2}),
    "granitemoe": ("GraniteMoe", {**SETTINGS, "num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 2.0}),
    "qwen3_5_text": ("Qwen3_5Text", {**SETTINGS, **_GATED_DELTA}),
    "qwen3_5_moe_text": ("Qwen3_5MoeText", {**SETTINGS, **_GATED_DELTA, **_SHARED_EXPERT}),
    "qwen3_next": ("Qwen3Next", {**SETTINGS, **_GATED_DELTA, **_SHARED_EXPERT}),
    "lfm2": ("Lfm2", _LFM2),
    "lfm2_moe": ("Lfm2Moe", {**_LFM2, **_EXPERTS, "num_dense_layers": 1}),
    "granitemoehybrid_mamba": (
        "GraniteMoeHybrid",
        {
            **SETTINGS,
            **_MAMBA2,
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 40,
            "logits_scaling": 2.0,
        },
    ),
    "nemotron_h": (
        "NemotronH",
        {
            **_NEOX,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "layers_block_type": ["mamba", "attention", "moe", "mlp"],
            "ssm_state_size": 12,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "chunk_size": 8,
            "n_routed_experts": 4,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
        },
    ),
    "bamba": ("Bamba", {**SETTINGS, **_MAMBA2, "attn_layer_indices": [1]}),
    "falcon_h1": (
        "FalconH1",
        {**SETTINGS, **_MAMBA2, "mamba_d_ssm": 64, "mamba_rms_norm": True, "lm_head_multiplier": 0.4},
    ),
    "mamba2": (
        "Mamba2",
        {
            **_NEOX,
            "num_heads": 8,
            "head_dim": 8,
            "state_size": 12,
            "n_groups": 2,
            "chunk_size": 8,
        },
    ),
    "gemma4": ("Gemma4Text", {**GEMMA4, "final_logit_softcapping": 3.0}),
    "gemma4_e2b": ("Gemma4Text", _GEMMA4_E2B),
    "gemma4_31b": ("Gemma4Text", {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4_moe": ("Gemma4Text", {**GEMMA4, "enable_moe_block": True, "top_k_experts": 2, **_EXPERTS}),
    "gpt_oss": ("GptOss", _GPT_OSS),
    "deepseek_v3": ("DeepseekV3", _DEEPSEEK),
    "glm4_moe": ("Glm4Moe", {**SETTINGS, **_SIGMOID, "head_dim": 8}),
    "glm4_moe_lite": ("Glm4MoeLite", {**_DEEPSEEK, "mlp_layer_types": ["dense", "sparse"]}),
    "gpt_neox_serial": ("GPTNeoX", {**_NEOX, "rotary_pct": 0.25, "use_parallel_residual": False}),
}
"""Name of a tiny model to the transformers class it is of and its settings."""


def model_type(name: str) -> str:
    """Transformers' name for the family of a tiny model."""
    return str(getattr(transformers, f"{FAMILIES[name][0]}Config").model_type)


def plain_model(name: str = "llama", *, seed: int = 0, attention: str = "eager", **changes: Any) -> Any:
    """A random fp32 model of a family, with changes to its settings; all biases and norms are random too."""
    kind, settings = FAMILIES[name]
    config = getattr(transformers, f"{kind}Config")(**{**settings, **changes})
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.ndim == 1:
                # Transformers starts biases at zero and norms at one, which would hide a forgotten one.
                parameter.add_(torch.randn(parameter.shape, generator=generator) * (0.1 if "norm" in path else 0.3))
    return model.eval()
