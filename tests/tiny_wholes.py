"""Tiny random vision-language models by transformers alone, with the settings of their text models."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_families import GEMMA4, MINISTRAL, SETTINGS

_GEMMA3 = {
    **SETTINGS,
    "head_dim": 8,
    "sliding_window": 4,
    "query_pre_attn_scalar": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
_QWEN35 = {
    **SETTINGS,
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
_EYE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14}  # fmt: skip
_EYE4 = {**_EYE, "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4}
_EYE35 = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
}

WHOLES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("Gemma3", "Gemma3Text", _GEMMA3, _EYE, {"mm_tokens_per_image": 4}),
    "gemma4": ("Gemma4", "Gemma4Text", GEMMA4, _EYE4, {"audio_config": None}),
    "mistral3": ("Mistral3", "Ministral3", MINISTRAL, {**_EYE, "model_type": "pixtral", "head_dim": 8},
                 {"image_token_index": 10}),
    "mistral3_untied": ("Mistral3", "Ministral3", MINISTRAL, {**_EYE, "model_type": "pixtral", "head_dim": 8},
                        {"image_token_index": 10, "tie_word_embeddings": False}),
    "qwen3_5": ("Qwen3_5", "Qwen3_5Text", _QWEN35, _EYE35, {}),
    "qwen3_5_moe": ("Qwen3_5Moe", "Qwen3_5MoeText", {**_QWEN35, **_EXPERTS}, _EYE35, {}),
}  # fmt: skip
"""Classes of the whole model and of its text model, the text model's settings, the tower's, and all others."""


def whole_model(name: str) -> Any:
    kind, text_kind, text, vision, others = WHOLES[name]
    text_type = getattr(transformers, f"{text_kind}Config").model_type
    config = getattr(transformers, f"{kind}Config")(
        text_config={**copy.deepcopy(text), "model_type": text_type}, vision_config=vision, **others
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()


def save_both(name: str, folder: Path) -> tuple[Path, Path]:
    """A directory of the whole model, and one of its text model with the same numbers."""
    whole, text_kind = whole_model(name), WHOLES[name][1].removesuffix("Text")
    transformers.utils.logging.disable_progress_bar()
    whole.save_pretrained(folder / "whole")
    config = copy.deepcopy(whole.config.text_config)
    config.tie_word_embeddings = whole.config.tie_word_embeddings
    text = getattr(transformers, f"{text_kind}ForCausalLM")(config)
    text.model.load_state_dict(whole.model.language_model.state_dict())
    text.lm_head.load_state_dict(whole.lm_head.state_dict())
    text.save_pretrained(folder / "text")
    return folder / "whole", folder / "text"
