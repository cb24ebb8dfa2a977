"""Why some families cannot be trained on packed samples, by model type; said where the check of a family fails."""

from __future__ import annotations

from collections.abc import Mapping

_STATE = "keeps a state that runs on from one sample into the next, so samples cannot be packed"
_ALIBI = "adds scores for positions inside its attention (alibi), which Weft does not support yet"
_WITH_STATE = (
    "bailing_hybrid",
    "bamba",
    "falcon_h1",
    "falcon_mamba",
    "granitemoehybrid",
    "jamba",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "mamba",
    "mamba2",
    "minimax",
    "nemotron_h",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "recurrent_gemma",
    "rwkv",
    "xlstm",
    "zamba",
    "zamba2",
)
OBSTACLES: Mapping[str, str] = {
    **dict.fromkeys(_WITH_STATE, _STATE),
    "bloom": _ALIBI,
    "mpt": _ALIBI,
    "gpt_oss": "has attention sinks, which Weft does not support yet",
}
