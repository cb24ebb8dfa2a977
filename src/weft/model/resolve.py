"""What a run's settings of its backbone mean: resolved once, before any weight is read.

Checks, plans and loading all take the result, so that none of them looks at the files or the devices again.

A model that also takes images or sound keeps its decoder's settings in `text_config` and its weights under
`language_model.`. Only the decoder is loaded, as the class that transformers has for it alone, so its paths are those
of a text model. Servers load the whole model, so adapters for them carry longer names (`store/peft_config.py`).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from weft.errors import ConfigError, ModelError
from weft.kernels.device import device_name, has_gpu, is_cpu
from weft.kernels.tuning import tuning_file
from weft.model.source import Source, find_source, gguf, quiet, readable
from weft.plan.cost.analytic import BackboneSetup
from weft.plan.cost.hardware import Hardware, find_hardware
from weft.plan.cost.shape import ModelShape
from weft.plan.families import is_described, why_unsupported
from weft.spec import AdapterSpec, BackboneSpec

if TYPE_CHECKING:
    from weft.model.backbone import Backbone


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
            return hardware_here(device_name(self.device))
        return None

    @functools.cached_property
    def skeleton(self) -> Backbone:
        """The backbone without weights: counts what formulas know of layers of one kind only."""
        from weft.model.load import load_skeleton

        return load_skeleton(self)

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

    def num_parameters(self, adapter: AdapterSpec) -> int | None:
        """Parameters of an adapter, counted on the model's own modules; None where all layers are alike, so that they
        follow from its rank."""
        return None if is_described(self.config) else self.skeleton.sites.num_parameters(adapter)

    def adapter_sizes(self, adapters: Sequence[AdapterSpec]) -> list[int | None]:
        """The same of the adapters of a run's jobs; a ConfigError names the job's setting."""
        found = []
        for index, adapter in enumerate(adapters):
            try:
                found.append(self.num_parameters(adapter))
            except ConfigError as error:
                raise error.at(f"jobs.{index}.{error.where}") from None
        return found

    def plain_row_bytes(self, adapters: Iterable[AdapterSpec]) -> int | None:
        """As in `MemoryModel`."""
        return None if is_described(self.config) else self.skeleton.row_bytes(self.dtype, adapters)

    def setup(
        self, ranks: Sequence[int], num_parameters: Sequence[int | None], adapters: Iterable[AdapterSpec]
    ) -> BackboneSetup:
        """The basis of cost models, with adapters of these ranks in a microbatch, and of as many parameters where they
        are known. `adapters`: those of the run."""
        known = [num for num in num_parameters if num is not None]
        mean = round(sum(known) / len(known)) if known else None
        spec = self.spec
        return BackboneSetup(
            self.shape, tuple(ranks), spec.quantize, spec.recompute, mean, self.plain_row_bytes(adapters)
        )


def resolve(spec: BackboneSpec | ResolvedModel, elsewhere: Hardware | None = None) -> ResolvedModel:
    """Finds a backbone's files and its device, unless already done; ModelError if files are missing."""
    if isinstance(spec, ResolvedModel):
        return spec
    planned = None if elsewhere is None else torch.device("cpu" if elsewhere.name == "cpu" else "cuda")
    device = planned or choose_device(spec)
    return ResolvedModel(spec, find_source(spec.base_model), device, choose_dtype(spec, device), elsewhere)


def hardware_here(name: str) -> Hardware:
    """The row of a device by its driver's name, with links if they have been measured here; ConfigError if unknown."""
    return find_hardware(name).with_links(name, links_file())


def links_file() -> Path:
    """File of `weft doctor --layouts`, beside that of `weft tune`."""
    return tuning_file().with_name("links.json")


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
    import transformers
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{config.model_type} is an encoder-decoder; Weft trains decoder-only models.", where=where)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and getattr(config, "text_config", None) is not None:
        raise ModelError(
            f"transformers {transformers.__version__} has no model for the text part ({config.text_config.model_type}) "
            f"of {config.model_type} alone; a newer release may have one.",
            where=where,
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"{config.model_type} is no model that writes text from left to right; Weft trains decoder-only models.",
            where=where,
        )
    if config.model_type == "falcon" and config.alibi:
        raise ModelError("falcon with alibi is not supported yet; with rotary positions it is.", where=where)


KEY_MAPPING = {
    r"^(?:model\.)?language_model\.(?:model\.)?(?!lm_head)": "model.",
    r"^language_model\.lm_head": "lm_head",
}
"""Names of weights in such files to names in the text model."""


def text_config_of(config: Any) -> Any | None:
    """The configuration of the text model; None if the model is one already, or transformers has no class for it."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    text = getattr(config, "text_config", None)
    if text is None or type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    text = copy.deepcopy(text)
    # The whole model decides whether its head is its embedding.
    text.tie_word_embeddings = bool(getattr(config, "tie_word_embeddings", text.tie_word_embeddings))
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(text, name, None) is None:
            setattr(text, name, getattr(config, name, None))
    return text


def is_auto_class(config: Any) -> bool:
    """True if transformers' AutoModelForCausalLM makes the text model of such a configuration, not the whole one."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    made = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return made is not None and made is MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config.text_config), None)


def names_in_files(path: str, prefix: str) -> Iterator[str]:
    """Names that the weight of a module may have in files; `prefix` is that of the decoder's paths."""
    rest = path.removeprefix(prefix)
    yield f"{path}.weight"
    yield f"{rest}.weight"
    # Nemotron 3's.
    yield f"backbone.{rest}.weight"
    if rest == path:
        yield f"language_model.{rest}.weight"
    else:
        yield f"model.language_model.{rest}.weight"
        yield f"language_model.model.{rest}.weight"
