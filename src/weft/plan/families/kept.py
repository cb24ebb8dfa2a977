"""The tensors that a layer of the fused step keeps of every row between its forward and its backward.

This is the only list of them: `model/fused/layer` keeps these, `model/fused/offload` moves the large ones, and
`plan/cost/memory` adds them up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from weft.plan.families.description import DecoderSizes

RECOMPUTE = ("none", "mlp", "full")
"""What may be computed again in the backward, from the least to the most."""


@dataclass(frozen=True)
class KeptTensor:
    """One tensor of a layer."""

    name: str
    """Field of the fused layer's saved tensors, or of what that field holds."""
    width: int
    """Numbers per row."""
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
    """The fields that `offload` moves."""
    return tuple(tensor.name for tensor in kept_tensors(sizes, 0) if tensor.is_moved)
