"""The PEFT methods, by the name that `method` of an adapter's settings has."""

from __future__ import annotations

from weft.adapters.method import CostRanks, Method
from weft.methods.bitfit.method import BitFit
from weft.methods.bottleneck.method import Bottleneck
from weft.methods.diff_pruning.method import DiffPruning
from weft.methods.dora.method import Dora
from weft.methods.ia3.method import Ia3
from weft.methods.lora.method import Lora
from weft.methods.lora.residual import ResidualLora
from weft.methods.vera.method import Vera
from weft.methods.virtual_tokens.method import PrefixTuning, PromptTuning
from weft.spec import AdapterSpec

METHODS: dict[str, Method] = {
    "bitfit": BitFit(),
    "bottleneck": Bottleneck(),
    "diff_pruning": DiffPruning(),
    "dora": Dora(),
    "ia3": Ia3(),
    "lora": Lora(),
    "prefix_tuning": PrefixTuning(),
    "prompt_tuning": PromptTuning(),
    "vera": Vera(),
}


_RESIDUAL_LORA = ResidualLora()


def method_of(spec: AdapterSpec) -> Method:
    """The method of an adapter."""
    return _RESIDUAL_LORA if spec.starts_as_weight else METHODS[spec.method]


def has_kernels(spec: AdapterSpec) -> bool:
    """Whether the fused path can run an adapter."""
    return method_of(spec).has_kernels(spec) and not spec.trains_rows


def cost_ranks(spec: AdapterSpec) -> CostRanks:
    """What an adapter costs, in the unit of the cost models."""
    return method_of(spec).cost_ranks(spec)
