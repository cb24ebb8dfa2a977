"""The table of model families in the README; `python -m weft.plan.family_table` prints it."""

from __future__ import annotations

from collections.abc import Iterable

from weft.plan.families import FAMILIES, OBSTACLES, REFERENCE_FAMILIES

TITLES = {
    "bailing_hybrid": "Ling hybrid",
    "bamba": "Bamba",
    "bloom": "BLOOM",
    "codegen": "CodeGen",
    "cohere": "Cohere",
    "cohere2": "Cohere 2",
    "deepseek_v3": "DeepSeek-V3",
    "falcon": "Falcon",
    "falcon_h1": "Falcon-H1",
    "falcon_mamba": "Falcon Mamba",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3",
    "gemma4_text": "Gemma 4",
    "glm4_moe": "GLM-4.5",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "gpt2": "GPT-2",
    "gpt_neo": "GPT-Neo",
    "gpt_neox": "GPT-NeoX",
    "gpt_oss": "gpt-oss",
    "gptj": "GPT-J",
    "granite": "Granite 3",
    "granitemoe": "Granite MoE",
    "granitemoehybrid": "Granite 4",
    "jamba": "Jamba",
    "kimi_linear": "Kimi Linear",
    "lfm2": "LFM2",
    "lfm2_moe": "LFM2-MoE",
    "llama": "Llama",
    "mamba": "Mamba",
    "mamba2": "Mamba-2",
    "minimax": "MiniMax",
    "ministral3": "Ministral 3",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "mpt": "MPT",
    "nemotron_h": "Nemotron 3",
    "olmo3": "OLMo 3",
    "olmoe": "OLMoE",
    "opt": "OPT",
    "phi3": "Phi-3, Phi-4",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen2_moe": "Qwen2-MoE",
    "qwen3": "Qwen3",
    "qwen3_5_moe_text": "Qwen3.5-MoE, 3.6-MoE",
    "qwen3_5_text": "Qwen3.5, 3.6, 3.8",
    "qwen3_moe": "Qwen3-MoE",
    "qwen3_next": "Qwen3-Next",
    "recurrent_gemma": "RecurrentGemma",
    "rwkv": "RWKV",
    "smollm3": "SmolLM3",
    "xlstm": "xLSTM",
    "zamba": "Zamba",
    "zamba2": "Zamba2",
}
"""Names of published models by transformers' model type."""
_DENSE_ONLY = ("granitemoehybrid",)
"""Families of which only dense models take the fast path."""


def table() -> str:
    """The families by what trains them, as Markdown."""
    fast = [f"{TITLES[kind]} (dense)" if kind in _DENSE_ONLY else TITLES[kind] for kind in FAMILIES]
    rows = {
        "fast path on a GPU": fast,
        "plain torch, as exact": _titles(REFERENCE_FAMILIES),
        "not yet": _titles(OBSTACLES),
    }
    lines = [f"| {path} | {', '.join(titles)} |" for path, titles in rows.items()]
    return "\n".join(["| trained by | models |", "|---|---|", *lines, ""])


def _titles(kinds: Iterable[str]) -> list[str]:
    return sorted((TITLES[kind] for kind in kinds), key=str.lower)


if __name__ == "__main__":
    print(table(), end="")
