"""What a run's settings of its backbone mean: resolved once, before any weight is read.

Checks, plans and loading all take the result, so that none of them looks at the files or the devices again.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from weft.errors import ConfigError, ModelError
from weft.kernels.device import device_name, has_gpu, is_cpu
from weft.model.source import Source, find_source, gguf, quiet, readable
from weft.model.text_part import text_config_of
from weft.plan.cost.analytic import BackboneSetup
from weft.plan.cost.hardware import Hardware, find_hardware
from weft.plan.cost.shape import ModelShape
from weft.plan.families import why_unsupported
from weft.spec import BackboneSpec


@dataclass(frozen=True)
class ResolvedModel:
    spec: BackboneSpec
    source: Source
    device: torch.device
    dtype: torch.dtype
    elsewhere: Hardware | None = None
    """The devices that it is planned for, if not those of this machine."""

    @functools.cached_property
    def transformers_config(self) -> Any:
        """Its transformers configuration, which takes seconds to import: read at first use.

        Of a model that also takes images it is that of the text model.
        """
        config = text_config_of(self.whole_config) or self.whole_config
        _check_family(config, self.where)
        return config

    @functools.cached_property
    def whole_config(self) -> Any:
        """That of all that is in its files."""
        from transformers import AutoConfig

        with quiet(), readable(self.source, "config.json cannot be loaded"):
            return AutoConfig.from_pretrained(self.source.path, **gguf(self.source))

    @property
    def is_text_part(self) -> bool:
        """True if its files have a whole vision-language model, of which only the text model is loaded."""
        return self.transformers_config is not self.whole_config

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        values: dict[str, Any] = self.transformers_config.to_dict()
        return values

    @functools.cached_property
    def shape(self) -> ModelShape:
        return ModelShape.from_config(self.config, self.spec.base_model)

    @functools.cached_property
    def hardware(self) -> Hardware | None:
        if self.elsewhere is not None:
            return self.elsewhere
        with suppress(ConfigError):
            return find_hardware(device_name(self.device))
        return None

    @property
    def where(self) -> str:
        return f"base_model {self.source.name}"

    @property
    def is_cpu(self) -> bool:
        return is_cpu(self.device)

    @property
    def is_fused(self) -> bool:
        """Whether it takes the fused path, as far as the configuration shows."""
        if self.spec.kernels != "auto":
            return self.spec.kernels == "fused"
        return not self.is_cpu and self.dtype != torch.float32 and why_unsupported(self.config) is None

    def setup(self, ranks: Sequence[int]) -> BackboneSetup:
        """The basis of cost models, with adapters of these ranks in a microbatch."""
        return BackboneSetup(self.shape, tuple(ranks), self.spec.quantize, self.spec.recompute)


def resolve(spec: BackboneSpec | ResolvedModel, elsewhere: Hardware | None = None) -> ResolvedModel:
    """Finds a backbone's files and its device, unless already done; ModelError if files are missing."""
    if isinstance(spec, ResolvedModel):
        return spec
    planned = None if elsewhere is None else torch.device("cpu" if elsewhere.name == "cpu" else "cuda")
    device = planned or choose_device(spec)
    return ResolvedModel(spec, find_source(spec.base_model), device, choose_dtype(spec, device), elsewhere)


def choose_device(spec: BackboneSpec) -> torch.device:
    if spec.device == "cuda" and not has_gpu():
        raise ModelError("cuda needs a GPU, and torch sees none; use cpu or auto.", where="device")
    if spec.device == "auto":
        return torch.device("cuda" if has_gpu() else "cpu")
    return torch.device(spec.device)


def choose_dtype(spec: BackboneSpec, device: torch.device) -> torch.dtype:
    if spec.dtype == "auto":
        return torch.float32 if is_cpu(device) else torch.bfloat16
    return torch.float32 if spec.dtype == "float32" else torch.bfloat16


def _check_family(config: Any, where: str) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{config.model_type} is an encoder-decoder; Weft trains decoder-only models.", where=where)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"{config.model_type} is no model that writes text from left to right; Weft trains decoder-only models.",
            where=where,
        )
    if config.model_type == "falcon" and config.alibi:
        raise ModelError("falcon with alibi is not supported yet; with rotary positions it is.", where=where)
