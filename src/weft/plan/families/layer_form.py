"""The structure of a decoder's layers, without its sizes.

Every layer on the fast path is: norm, attention with rotary positions, norm, a gated feed-forward block; each block's
result is added to the residual stream, in some families after another norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]
ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Activations by transformers' names."""
NormWeight = Literal["factor", "one_plus"]
"""`factor`: the normed row is rounded, then multiplied by the weight. `one_plus`: it is multiplied by 1 + the weight in
fp32 and rounded once."""

Sites = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], tuple[str, ...]]
SEPARATE: Sites = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
"""Linears that read the same input, in the order of a layer."""
JOINED: Sites = (("self_attn.qkv_proj",), ("self_attn.o_proj",), ("mlp.gate_up_proj",), ("mlp.down_proj",))
"""The same where one module has all outputs of a site."""


@dataclass(frozen=True)
class NormModules:
    """The modules that norm a block's input and, in some families, its result before the residual stream."""

    before_attention: str = "input_layernorm"
    before_mlp: str = "post_attention_layernorm"
    after_attention: str | None = None
    after_mlp: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the existing modules."""
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
    has_head_norms: bool = False
    """True if q and k are normed head by head; their raw values are then kept for the backward."""

    @property
    def blocks(self) -> tuple[str, ...]:
        """The modules whose results are added to the residual stream: attention and the feed-forward block."""
        return tuple(dict.fromkeys(path.partition(".")[0] for site in self.sites for path in site))

    @property
    def norms_results(self) -> bool:
        """True if a block's result is normed before it is added to the residual stream."""
        return self.norms.after_mlp is not None
