"""Counts that follow from a backbone's sizes: parameters, FLOPs, bytes.

Per layer and token, forward: 2 FLOP per weight of its linears; attention 4 · heads · head size FLOP per (query, key)
pair, of which a causal sample of n tokens has n (n + 1) / 2. Independent of devices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from weft.errors import ConfigError, did_you_mean
from weft.plan.decoder import Config, DecoderSizes
from weft.plan.families import LINEARS, describe
from weft.spec.run import Capacity

ALL_LINEAR = "all-linear"


class ModelShape(DecoderSizes):
    @staticmethod
    def from_config(config: Config, name: str = "") -> ModelShape:
        sizes = describe(config, name).sizes
        return ModelShape(**{field.name: getattr(sizes, field.name) for field in fields(sizes)})

    @property
    def layer_weights(self) -> int:
        return sum(num_out * num_in for num_out, num_in in self.linears.values())

    @property
    def layer_extras(self) -> int:
        """A layer's norms, biases and idle experts, which are never quantised."""
        biases = self.qkv_width if self.form.has_qkv_bias else 0
        normed = {"none": 0, "each": 2, "all": self.num_heads + self.num_kv_heads}[self.form.head_norm]
        own = len(self.form.norms.names) * self.hidden + biases + normed * self.head_size
        return own + self.idle_weights

    @property
    def head_weights(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def num_parameters(self) -> int:
        embeddings = self.head_weights * (1 if self.tied else 2)
        return self.num_layers * (self.layer_weights + self.layer_extras) + embeddings + self.hidden

    def adapter_parameters(self, rank: int, targets: str | Sequence[str] = ALL_LINEAR) -> int:
        names = self.chosen(targets)
        return self.num_layers * rank * sum(sum(self.linears[name]) for name in names)

    def chosen(self, targets: str | Sequence[str]) -> tuple[str, ...]:
        return chosen_linears(targets, tuple(self.linears))

    def attention_flop(self, lengths: Sequence[int]) -> float:
        return 4.0 * self.attention_width * causal_pairs(lengths)


def causal_pairs(lengths: Sequence[int]) -> float:
    """(query, key) pairs inside causal samples."""
    return sum(n * (n + 1) for n in lengths) / 2


def chosen_linears(targets: str | Sequence[str], known: Sequence[str] = LINEARS) -> tuple[str, ...]:
    """The linears among those known that `target_modules` names, in order; by default of any family."""
    if isinstance(targets, str):
        if targets in (ALL_LINEAR, "all"):
            return tuple(known)
        targets = (targets,)
    for name in targets:
        if name not in known:
            raise ConfigError(
                f"a layer has no linear {name!r}; it has {', '.join(known)}.",
                where="target_modules",
                hint=did_you_mean(name, known),
            )
    return tuple(name for name in known if name in targets)


def stage_layers(num_layers: int, num_stages: int, chosen: Sequence[int] | None = None) -> tuple[int, ...]:
    """Layers of every stage: as chosen, or equal with fewer on the last stages, which have the head."""
    if not 1 <= num_stages <= num_layers:
        raise ConfigError(f"got {num_stages} for {num_layers} layers; every stage needs a layer.", where="num_stages")
    if chosen is None:
        return tuple(math.ceil((num_layers - stage) / num_stages) for stage in range(num_stages))
    if len(chosen) != num_stages or sum(chosen) != num_layers or min(chosen) < 1:
        raise ConfigError(
            f"got {list(chosen)} for {num_layers} layers on {num_stages} stages; name at least 1 for each, all in all "
            f"{num_layers}.",
            where="split",
        )
    return tuple(chosen)


CPU_ROW_TILE = 128
"""Rows per frozen product on a CPU: smaller blocks are slower, larger ones leave more rows of a small microbatch empty;
`python -m benchmarks cpu-blocks` measures it."""
GPU_ROW_TILE = 2048
"""Most rows per frozen product on a GPU: enough to fill it, few enough that half a microbatch costs half."""
WIDE = 8192
"""Hidden size from which half as many rows fill a GPU and leave fewer of them empty."""
GRAIN = 64
"""Multiple of tiles on a GPU."""
CPU_CAPACITY = 2048
"""Default tokens of a microbatch on a CPU: products of more rows are no faster, and take memory."""
GPU_CAPACITY = 8192
"""Default tokens of a microbatch on a GPU, where frozen products and launches are most efficient."""


def choose_capacity(wanted: Capacity, device: str, longest: int = 0) -> int:
    """Tokens of a run's microbatches; `auto` depends on device (`cpu` or any GPU's name) and longest sample only."""
    if wanted != "auto":
        return wanted
    usual = CPU_CAPACITY if device == "cpu" else GPU_CAPACITY
    return usual if longest <= usual else 1 << (longest - 1).bit_length()


def capacities(wanted: Capacity, device: str, longest: int = 0) -> list[int]:
    """The capacity, and with `auto` the smaller ones to try if memory is short for the jobs beside it. These are halves
    of it, down to a whole tile: products with fewer rows are slower."""
    found = [choose_capacity(wanted, device, longest)]
    while wanted == "auto" and found[-1] // 2 >= max(GPU_ROW_TILE, longest):
        found.append(found[-1] // 2)
    return found


def estimated_row_tile(device: str, capacity: int, hidden: int) -> int:
    """The row tile of the fused path on `cpu` or a GPU of any name."""
    return CPU_ROW_TILE if device == "cpu" else gpu_row_tile(capacity, hidden)


def gpu_row_tile(capacity: int, hidden: int) -> int:
    """The tile that divides a capacity into whole tiles, so that a full microbatch leaves hardly a row empty."""
    most = GPU_ROW_TILE if hidden < WIDE else GPU_ROW_TILE // 2
    num_tiles = -(-capacity // most)
    return -(-capacity // (num_tiles * GRAIN)) * GRAIN


EMBEDDED = "tiny"
"""Shape of the embedded backbone; every other shape is built with random weights."""
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
    name: str
    family: str
    """Config class of transformers, without `Config`."""
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
    extra: Mapping[str, Any] = field(default_factory=dict)
    layer_type: str | None = None
    """Type of all layers; None: those of the family."""

    def config(self) -> Any:
        import transformers

        make = getattr(transformers, f"{self.family}Config")
        types = {} if self.layer_type is None else {"layer_types": [self.layer_type] * self.layers}
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
            **types,
            **self.extra,
        )

    @property
    def num_product_weights(self) -> int:
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.ffn) + self.hidden * self.vocabulary


GEMMA3_ROPE: Mapping[str, Any] = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
GEMMA3 = {"sliding_window": 1024, "query_pre_attn_scalar": 256}
PHI = {"pad_token_id": 0}
"""Settings of Phi models whose default padding token is outside of smaller vocabularies."""
PHI3 = {**PHI, "sliding_window": 2047}
PHI4_MINI_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
"""Rotary positions of Phi-4-mini, valid up to samples of 4,096 tokens."""


OLMO3_ROPE: Mapping[str, Any] = {
    "full_attention": {
        "rope_type": "yarn",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "attention_factor": 1.2079441541679836,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
}
MINISTRAL3_ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _granite(attention: float, residual: float, logits: float, **more: Any) -> dict[str, Any]:
    """The four factors of a Granite model."""
    factors = {"attention_multiplier": attention, "residual_multiplier": residual, "logits_scaling": logits}
    return {"embedding_multiplier": 12.0, **factors, **more}


def _dense(ffn: int) -> dict[str, Any]:
    """Settings of a dense Granite 4 in place of those of experts."""
    return {"num_local_experts": 0, "shared_intermediate_size": ffn, "position_embedding_type": "rope"}


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
        Shape("smollm3-3b", "SmolLM3", 2048, 11008, 36, 16, 4, 128256, _theta(5e6), positions=65536, tied=True),
        Shape("olmo-3-7b", "Olmo3", 4096, 11008, 32, 32, 32, 100278, OLMO3_ROPE, positions=65536),
        Shape("ministral-3-8b", "Ministral3", 4096, 14336, 34, 32, 8, 131072, MINISTRAL3_ROPE, positions=262144),
        Shape(
            "granite-3.3-2b",
            "Granite",
            2048,
            8192,
            40,
            32,
            8,
            49159,
            _theta(1e7),
            64,
            131072,
            True,
            _granite(0.015625, 0.22, 8.0),
        ),
        Shape(
            "granite-4.0-micro",
            "GraniteMoeHybrid",
            2560,
            8192,
            40,
            40,
            8,
            100352,
            _theta(1e7),
            64,
            131072,
            True,
            _granite(0.015625, 0.22, 10.0, **_dense(8192)),
            "full_attention",
        ),
        Shape("tinyllama-1.1b", "Llama", 2048, 5632, 22, 32, 4, 32000, head_size=64, positions=2048),
        Shape("tiny", "Llama", 64, 128, 2, 4, 2, 256, head_size=16, positions=2048),
    )
}
"""Published sizes; `tiny` is for trying the tool without a GPU."""


def find_shape(name: str) -> Shape:
    if name in SHAPES:
        return SHAPES[name]
    raise ConfigError(
        f"there is no shape {name!r}; accepted are {', '.join(SHAPES)}.",
        where="--model",
        hint=did_you_mean(name, SHAPES),
    )
