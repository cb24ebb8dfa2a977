"""The PEFT methods, by the name that `method` of an adapter's settings has."""

from __future__ import annotations

from importlib import import_module

from weft.adapters.method import CostRanks, Method
from weft.methods.config import MethodConfig
from weft.methods.configs import CONFIGS
from weft.methods.lora.residual import ResidualLora
from weft.spec import AdapterSpec


def _load(config: MethodConfig) -> Method:
    folder = type(config).__module__.rpartition(".")[0]
    methods: dict[str, Method] = import_module(f"{folder}.method").METHODS
    return methods[config.name]


METHODS = {name: _load(CONFIGS[name]) for name in sorted(CONFIGS)}
_RESIDUAL_LORA = ResidualLora()


def method_of(spec: AdapterSpec) -> Method:
    return _RESIDUAL_LORA if spec.starts_as_weight else METHODS[spec.method]


def has_kernels(spec: AdapterSpec) -> bool:
    """Whether the fused path can run an adapter."""
    return method_of(spec).has_kernels(spec) and not spec.trains_rows


def cost_ranks(spec: AdapterSpec) -> CostRanks:
    return method_of(spec).cost_ranks(spec)
