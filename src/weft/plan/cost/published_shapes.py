"""The sizes of published models, by name: time and memory depend on them alone, so nothing is downloaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.errors import ConfigError, closest

EMBEDDED = "tiny"
"""As a model to measure, the embedded backbone; every other name of a shape is built with random weights."""
LLAMA31_ROPE: Mapping[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA32_ROPE = {**LLAMA31_ROPE, "factor": 32.0}


@dataclass(frozen=True)
class Shape:
    """The sizes of one published model."""

    name: str
    family: str
    """The config class of transformers, without `Config`."""
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    head_size: int = 128
    positions: int = 32768
    tied: bool = False
    """The output head is the embedding."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Settings only this family has."""

    def config(self) -> Any:
        """The configuration transformers builds the model from."""
        import transformers

        make = getattr(transformers, f"{self.family}Config")
        return make(
            hidden_size=self.hidden,
            intermediate_size=self.ffn,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_size,
            vocab_size=self.vocabulary,
            rope_parameters=dict(self.rope),
            max_position_embeddings=self.positions,
            rms_norm_eps=1e-5,
            tie_word_embeddings=self.tied,
            use_cache=False,
            **self.extra,
        )

    @property
    def num_product_weights(self) -> int:
        """Weights that every token is multiplied with: all linears and the output head."""
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.ffn) + self.hidden * self.vocabulary


GEMMA3_ROPE: Mapping[str, Any] = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
GEMMA3 = {"sliding_window": 1024, "query_pre_attn_scalar": 256}
PHI = {"pad_token_id": 0}
"""The default lies outside of smaller vocabularies."""
PHI3 = {**PHI, "sliding_window": 2047}
PHI4_MINI_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
"""As far as samples of 4,096 tokens."""


def _theta(base: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": base}


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("llama-3.1-8b", "Llama", 4096, 14336, 32, 32, 8, 128256, LLAMA31_ROPE),
        Shape("llama-3.1-70b", "Llama", 8192, 28672, 80, 64, 8, 128256, LLAMA31_ROPE),
        Shape("llama-3.2-1b", "Llama", 2048, 8192, 16, 32, 8, 128256, LLAMA32_ROPE, head_size=64, tied=True),
        Shape("llama-3.2-3b", "Llama", 3072, 8192, 28, 24, 8, 128256, LLAMA32_ROPE, tied=True),
        Shape("qwen2.5-0.5b", "Qwen2", 896, 4864, 24, 14, 2, 151936, _theta(1e6), head_size=64, tied=True),
        Shape("qwen2.5-3b", "Qwen2", 2048, 11008, 36, 16, 2, 151936, _theta(1e6), tied=True),
        Shape("qwen2.5-7b", "Qwen2", 3584, 18944, 28, 28, 4, 152064, _theta(1e6)),
        Shape("qwen3-8b", "Qwen3", 4096, 12288, 36, 32, 8, 151936, _theta(1e6)),
        Shape("mistral-7b", "Mistral", 4096, 14336, 32, 32, 8, 32768, _theta(1e6), extra={"sliding_window": None}),
        Shape("gemma-3-4b", "Gemma3Text", 2560, 10240, 34, 8, 4, 262208, GEMMA3_ROPE, 256, 131072, True, GEMMA3),
        Shape("phi-3-mini", "Phi3", 3072, 8192, 32, 32, 32, 32064, _theta(1e4), 96, 4096, extra=PHI3),
        Shape(
            "phi-4-mini", "Phi3", 3072, 8192, 32, 24, 8, 200064, PHI4_MINI_ROPE, positions=4096, tied=True, extra=PHI
        ),
        Shape("phi-4", "Phi3", 5120, 17920, 40, 40, 10, 100352, _theta(250000.0), positions=16384, extra=PHI),
        Shape("tinyllama-1.1b", "Llama", 2048, 5632, 22, 32, 4, 32000, head_size=64, positions=2048),
        Shape("tiny", "Llama", 64, 128, 2, 4, 2, 256, head_size=16, positions=2048),
    )
}
"""`tiny` is for looking at the tool without a GPU; the others are the published sizes."""


def find_shape(name: str) -> Shape:
    """The shape of that name."""
    if name in SHAPES:
        return SHAPES[name]
    guess = closest(name, list(SHAPES))
    raise ConfigError(
        f"there is no shape {name!r}; accepted are {', '.join(SHAPES)}.",
        where="--model",
        hint=f"Did you mean {guess}?" if guess else None,
    )
