"""The structure of a decoder's layers, without its sizes.

Every layer on the fast path is: norm, attention with rotary positions or none, norm, a gated feed-forward block; each
block's result is added to the residual stream, in some families after another norm or a factor. Some have only that
other norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from weft.errors import ModelError

Activation = Literal["silu", "gelu_tanh"]
ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Activations by transformers' names."""
NormWeight = Literal["factor", "exact_factor", "one_plus"]
"""`factor`: the normed row is rounded, then multiplied by the weight. `exact_factor`: it is multiplied in fp32 and
rounded once. `one_plus`: likewise, by 1 + the weight."""
HeadNorm = Literal["none", "each", "all"]
"""Norms of q and k: of each head, or of all heads at once."""

Sites = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], tuple[str, ...]]
SEPARATE: Sites = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
"""Names of linears that read the same input, in the order of a layer."""
JOINED: Sites = (("self_attn.qkv_proj",), ("self_attn.o_proj",), ("mlp.gate_up_proj",), ("mlp.down_proj",))
"""Names of linears where one module has all outputs of a site, in the order of a layer."""


@dataclass(frozen=True)
class NormModules:
    """The modules that norm a block's input and, in some families, its result before the residual stream."""

    before_attention: str | None = "input_layernorm"
    before_mlp: str | None = "post_attention_layernorm"
    after_attention: str | None = None
    after_mlp: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        result = (self.before_attention, self.before_mlp, self.after_attention, self.after_mlp)
        return tuple(name for name in result if name is not None)


@dataclass(frozen=True)
class LayerForm:
    """The structure of a family's layers; the defaults are Llama's."""

    sites: Sites = SEPARATE
    """Module paths within a layer: of q, k and v; of the attention's output; of gate and up; of down."""
    norms: NormModules = NormModules()
    norm_weight: NormWeight = "factor"
    activation: Activation | None = "silu"
    """Activation of the gate; None: one without a kernel."""
    has_qkv_bias: bool = False
    head_norm: HeadNorm = "none"
    """Norms of q and k; their raw values are then kept for the backward."""
    scales_results: bool = False
    """True if a block's result is multiplied by a number before it is added to the residual stream."""

    @property
    def blocks(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(path.partition(".")[0] for site in self.sites for path in site))

    @property
    def has_head_norms(self) -> bool:
        return self.head_norm != "none"

    @property
    def norms_results(self) -> bool:
        """True if a block's result is normed before it is added to the residual stream."""
        return self.norms.after_mlp is not None


Config = Mapping[str, Any]
"""A transformers configuration, as in its `to_dict()` or config.json."""


@dataclass(frozen=True)
class DecoderSizes:
    name: str
    hidden: int
    ffn: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocabulary: int
    tied: bool = False
    form: LayerForm = LayerForm()
    idle_weights: int = 0
    """Weights of a layer's routed experts that a token does not use."""

    @property
    def attention_width(self) -> int:
        return self.num_heads * self.head_size

    @property
    def qkv_width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_size

    @cached_property
    def sites(self) -> tuple[tuple[str, ...], ...]:
        """The linears of a layer that read the same input, by their own names."""
        return tuple(tuple(name.rpartition(".")[2] for name in site) for site in self.form.sites)

    @cached_property
    def linears(self) -> dict[str, tuple[int, int]]:
        key_value = self.num_kv_heads * self.head_size
        parts = ((self.attention_width, key_value, key_value), (self.hidden,), (self.ffn, self.ffn), (self.hidden,))
        inputs = (self.hidden, self.attention_width, self.hidden, self.ffn)
        result = {}
        for names, sizes, num_in in zip(self.sites, parts, inputs, strict=True):
            # One module may be a whole site already.
            outs = sizes if len(names) == len(sizes) else (sum(sizes),)
            result.update({name: (num_out, num_in) for name, num_out in zip(names, outs, strict=True)})
        return result


@dataclass(frozen=True)
class Rotary:
    kind: str = ""
    """Kind of layer in transformers' terms; empty where all layers are of one."""
    scaling: str = "default"
    share: float = 1.0
    """Fraction of a head's numbers that are rotated."""
    is_none: bool = False
    """True if nothing is rotated."""
    stretch: tuple[float, int] | None = None
    """β and n if rotated queries are multiplied by 1 + β · log(1 + ⌊position / n⌋)."""


@dataclass(frozen=True)
class LayerKind:
    window: int | None = None
    """Keys that a query attends to; None: all before it."""
    rotary: int = 0
    """Index of its rotary positions in `Decoder.rotaries`."""


@dataclass(frozen=True)
class Decoder:
    """The description of a decoder for the fast path, the memory model and the time model."""

    family: str
    sizes: DecoderSizes
    layers: tuple[LayerKind, ...]
    attention_scale: float
    rotaries: tuple[Rotary, ...] = (Rotary(),)
    embedding_scale: float | None = None
    """Factor of the embeddings, in their own type."""
    input_scale: float | None = None
    """Factor of all that enters the first layer, replaced rows included."""
    residual_scale: float | None = None
    """Factor of a block's result before it is added to the residual stream."""


OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("n_embd",),
    "intermediate_size": ("ffn_dim", "n_inner", "ffn_hidden_size"),
    "num_attention_heads": ("n_head", "num_heads"),
    "num_hidden_layers": ("n_layer", "num_layers"),
}
"""Names of sizes in configurations of older families."""


def read_sizes(config: Config, name: str, form: LayerForm) -> DecoderSizes:
    """The sizes in a configuration; `name` is the user's name of the model."""
    where = name or str(config.get("model_type") or "config")
    heads, hidden = _size(config, "num_attention_heads", where), _size(config, "hidden_size", where)
    return DecoderSizes(
        name=name or str(config.get("_name_or_path") or config.get("model_type", "")),
        hidden=hidden,
        # GPT-2 and its relatives leave it open.
        ffn=_size(config, "intermediate_size", where, 4 * hidden if "n_inner" in config else None),
        num_layers=_size(config, "num_hidden_layers", where),
        num_heads=heads,
        num_kv_heads=_size(config, "num_key_value_heads", where, heads),
        head_size=_size(config, "head_dim", where, hidden // heads),
        vocabulary=_size(config, "vocab_size", where),
        tied=bool(config.get("tie_word_embeddings", False)),
        form=form,
    )


def read_rotary(config: Config, kind: str = "") -> Rotary:
    rope = config.get("rope_parameters") or {}
    rope = (rope.get(kind) or {}) if kind else rope
    return Rotary(kind, str(rope.get("rope_type", "default")), float(rope.get("partial_rotary_factor", 1.0)))


def read_window(config: Config) -> int | None:
    """Keys that a query attends to in layers with a window; None where it is wider than any sample."""
    window: int | None = config.get("sliding_window")
    return None if window is None or window >= config.get("max_position_embeddings", 2**31) else window


def _size(config: Config, key: str, where: str, default: int | None = None) -> int:
    found = (config[name] for name in (key, *OTHER_NAMES.get(key, ())) if config.get(name) is not None)
    value = next(found, None)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        problem = "is missing" if value is None else f"is {value!r}"
        raise ModelError(f"{key} {problem}; a decoder's configuration has it as a positive whole number.", where=where)
    return value


RECOMPUTE = ("none", "mlp", "full")
"""Names of what the backward may compute again, from the least to the most."""


@dataclass(frozen=True)
class KeptTensor:
    name: str
    width: int
    most: str = "mlp"
    """Highest recomputation setting with which it is still kept."""
    is_split: bool = False
    """True if each tensor-parallel device has a part of it."""
    is_moved: bool = False
    """True if `offload` moves it to the host's memory: a large tensor that nothing else refers to."""
    num_bytes: int | None = None
    """Bytes of one number; None for those of an activation."""

    def is_kept(self, recompute: str) -> bool:
        """True if the backward has it without computing it again."""
        return RECOMPUTE.index(recompute) <= RECOMPUTE.index(self.most)


def kept_tensors(sizes: DecoderSizes, rank_class: int) -> Iterator[KeptTensor]:
    """All tensors that a layer may keep; `rank_class` is the width of one linear's adapter in S."""
    form, hidden, qkv = sizes.form, sizes.hidden, sizes.qkv_width
    yield KeptTensor("x_TD", hidden, "full", is_moved=True)
    if form.norms_results:
        # The first layer has nothing added before it, but after the last there is one more norm.
        yield KeptTensor("y_TD", hidden, "full", is_moved=True)
        yield KeptTensor("y_mid_TD", hidden, is_moved=True)
    if form.has_head_norms:
        yield KeptTensor("raw_qkv_TE", qkv, is_split=True, is_moved=True)
    yield KeptTensor("attended.qkv_TE", qkv, is_split=True)
    yield KeptTensor("attended.output_THC", sizes.attention_width, is_split=True)
    yield KeptTensor("attended.lse_HT", sizes.num_heads, is_split=True, num_bytes=4)
    yield KeptTensor("mid_TD", hidden, is_moved=True)
    yield KeptTensor("gu_TJ", 2 * sizes.ffn, "none", is_split=True, is_moved=True)
    for name, site in zip(("s_qkv", "s_out", "s_gate_up", "s_down"), form.sites, strict=True):
        yield KeptTensor(name, len(site) * rank_class)


def moved_names(sizes: DecoderSizes) -> tuple[str, ...]:
    return tuple(tensor.name for tensor in kept_tensors(sizes, 0) if tensor.is_moved)
