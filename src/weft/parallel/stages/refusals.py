"""What a backbone in parts does not take, as far as a description tells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weft.errors import ConfigError
from weft.methods.configs import CONFIGS
from weft.methods.registry import has_kernels
from weft.model.backbone import Backbone
from weft.parallel.stages.gradient import JobShare
from weft.spec import AdapterSpec, JobSpec

WHOLE_STATES = ("adamw_8bit",)
"""Optimizers that remember blocks of numbers, which a border between two stages may cut."""


def refuse_divided(spec: JobSpec, replica_sizes: Sequence[int]) -> None:
    """ConfigError for settings of a job that need its adapter in one piece, where a replica has several stages."""
    if spec.optim in WHOLE_STATES and max(replica_sizes) > 1:
        found = f"{spec.optim} keeps blocks of numbers, which a border between two stages may cut"
        raise ConfigError(f"{found}; use adamw, or a layout whose replicas have one stage each.", where="optim")


def refuse_indivisible(spec: JobSpec) -> None:
    """ConfigError for settings of a job that need every layer in one piece."""
    _refuse_indivisible_method(spec.adapter, "adapter.method")
    if spec.adapter.eva is not None:
        found = "eva looks at whole inputs, of which devices that share layers have parts; use another start."
        raise ConfigError(found, where="adapter.init_lora_weights")
    if spec.gradient_sum == "any_order":
        raise ConfigError("any_order is not supported with tensor:N; use in_order.", where="gradient_sum")


def refuse_method(adapter: AdapterSpec, backbone: Backbone, where: str) -> None:
    """ConfigError for a method that this part of a backbone cannot run."""
    if backbone.lane(adapter):
        refuse_without_kernels(adapter, where)
    if backbone.devices is not None:
        _refuse_indivisible_method(adapter, where)


def refuse_without_kernels(adapter: AdapterSpec, where: str) -> None:
    """ConfigError for an adapter that no kernels run, where a backbone in parts has them."""
    if has_kernels(adapter):
        return
    what, way = f"{adapter.method} with these settings", "use kernels reference"
    if adapter.trains_rows:
        what = "an adapter with rows of tokens"
    elif has_kernels(replace(adapter, lora_dropout=0.0)):
        what, way = f"{adapter.method} with lora_dropout", "leave lora_dropout out, or use kernels reference"
    raise ConfigError(f"{what} has no kernels, and a layout runs one path; {way}.", where=where)


def _refuse_indivisible_method(adapter: AdapterSpec, where: str) -> None:
    reason = adapter.config.undivided
    if reason is not None:
        known = ", ".join(sorted(name for name, config in CONFIGS.items() if config.undivided is None))
        raise ConfigError(f"{adapter.method} {reason}; with tensor:N use {known}.", where=where)


def refuse_unlike(shares: Sequence[JobShare]) -> None:
    """ConfigError where what all modules of an adapter share would depend on where the model is cut."""
    found = "share matrices that are as wide as the widest of them, which is not on every stage"
    shapes = [{name: x.shape for name, x in share.shared.items()} for share in shares if share.modules]
    if any(own != shapes[0] for own in shapes):
        what = f"its modules {found}; adapt all layers alike, or use one device."
        raise ConfigError(what, where="adapter.target_modules")
    compared = [share.compared for share in shares if share.compared is not None]
    if any(own != compared[0] for own in compared):
        what = f"the modules of the adapter that it compares with {found}; use one device."
        raise ConfigError(what, where="objective")
