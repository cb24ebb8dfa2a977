"""Checks whether an inference server loads an adapter, and which options it needs.

The rules are those of vLLM 0.32 and SGLang 0.5.23. PEFT itself loads every adapter of a method that PEFT has.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from weft.adapters.method import Attachment
from weft.errors import ConfigError
from weft.methods.registry import cost_ranks, method_of
from weft.spec import AdapterSpec

SERVERS = ("vllm", "sglang", "peft")
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM's --max-lora-rank accepts."""
VLLM_DEFAULT_RANK = 16

_TITLES = {"vllm": "vLLM", "sglang": "SGLang"}
_ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"})
_MLP = frozenset({"gate_proj", "up_proj", "down_proj", "gate_up_proj"})
_MODULES = _ATTENTION | _MLP | {"lm_head"}
"""Linear modules that both servers can adapt."""


@dataclass(frozen=True)
class ServingRemark:
    """One sentence about serving an adapter."""

    text: str
    refused: bool
    """True: the server refuses the adapter or would serve it wrongly. False: it works with the options in the text."""

    def __str__(self) -> str:
        return self.text


def check_servable(spec: AdapterSpec, module_paths: Collection[str], server: str) -> list[ServingRemark]:
    """Reasons for which a server would refuse the adapter, and the options it needs; empty if there are none."""
    if server not in SERVERS:
        raise ConfigError(f"{server!r} is not a known server; accepted are {', '.join(SERVERS)}.")
    method = method_of(spec)
    title = method.files.title
    if server == "peft":
        return (
            [] if method.files.in_peft else [ServingRemark(f"PEFT has no {title}; only Weft runs this adapter.", True)]
        )
    if not spec.config.is_served:
        only = f"{_TITLES[server]} takes LoRA adapters only"
        if method.attachment is not Attachment.LINEAR:
            return [ServingRemark(f"{only}, and this {title} cannot be merged into its base.", True)]
        return [ServingRemark(f"{only}; merge this {title} into {spec.config.merges_into}.", True)]
    if spec.trains_rows:
        problem = f"{_TITLES[server]} takes adapters on linear modules only, and this {title} has rows of tokens"
        return [ServingRemark(f"{problem}; merge it into its base.", True)]
    remarks = _outside(module_paths, server)
    # Servers look at every pattern, also at those that match no module of this backbone.
    top = cost_ranks(spec).widest
    return remarks + (_vllm_remarks(top) if server == "vllm" else _sglang_remarks(spec))


def _outside(module_paths: Collection[str], server: str) -> list[ServingRemark]:
    names = sorted({path.rpartition(".")[2] for path in module_paths} - _MODULES)
    if not names:
        return []
    return [ServingRemark(f"{_TITLES[server]} takes no adapters on {', '.join(names)}.", refused=True)]


def _vllm_remarks(top: int) -> list[ServingRemark]:
    if top <= VLLM_DEFAULT_RANK:
        return []
    fitting = [rank for rank in VLLM_RANKS if rank >= top]
    if not fitting:
        return [ServingRemark(f"vLLM takes ranks up to {VLLM_RANKS[-1]}; this adapter has {top}.", refused=True)]
    return [ServingRemark(f"Start vLLM with --max-lora-rank {fitting[0]}; this adapter has rank {top}.", refused=False)]


def _sglang_remarks(spec: AdapterSpec) -> list[ServingRemark]:
    remarks = []
    alpha = spec.default_alpha
    if any(rank != spec.r for rank in spec.rank_pattern.values()):
        remarks.append(ServingRemark("SGLang takes one rank per adapter; this one has a rank_pattern.", refused=True))
    if any(other != alpha for other in spec.alpha_pattern.values()):
        remarks.append(
            ServingRemark("SGLang takes one alpha per adapter; this one has an alpha_pattern.", refused=True)
        )
    if spec.use_rslora and spec.r > 1:
        remedy = f"set use_rslora to false and lora_alpha to {alpha * math.sqrt(spec.r)!r} in adapter_config.json"
        remarks.append(ServingRemark(f"SGLang ignores use_rslora and would scale too weakly; {remedy}.", refused=True))
    return remarks
