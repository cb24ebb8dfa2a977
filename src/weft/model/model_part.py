"""A part of a model: some of its layers, for one stage of a pipeline, or all; its sites, and the adapters on them.

The first part has the embedding, the last the final norm and the output head. A module that is missing leaves one
without weights, so that every path is that of the whole model: starting values and dropout depend on paths."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from weft.adapters.experts import ExpertSite
from weft.adapters.method import Attachment, LinearShape, Method
from weft.adapters.routing import Routing
from weft.adapters.sites import BlockOutput, InputRows, KeyValueRows, RowSite, SlotLinear, linear_modules
from weft.adapters.targets import choose_modules, is_named, refuse_experts
from weft.methods.registry import method_of
from weft.methods.virtual_tokens.method import INPUT_PATH, layer_path
from weft.model.packing.experts import expert_products_of, expert_weights, in_model_order
from weft.plan.families import describe, final_norm, is_described, spared
from weft.settings import is_expert_path, listed
from weft.spec import AdapterSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

WHOLE = "weft_linears"
"""Attribute of a part of a model with the paths of all linears and products of experts of the whole."""
TIED = "weft_is_tied"
"""Attribute of a part of a model: whether embedding and output head of the whole share their rows."""


@dataclass(frozen=True)
class ModelPart:
    """The layers from `first` to before `end`."""

    first: int
    end: int
    num_layers: int

    @property
    def is_first(self) -> bool:
        return self.first == 0

    @property
    def is_last(self) -> bool:
        return self.end == self.num_layers


class AbsentLayer(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        # A decoder may read of which kind its layers are.
        self.__dict__.update({name: value for name, value in vars(layer).items() if isinstance(value, str)})

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden_states


class AbsentWeight(nn.Module):
    """An embedding or output head of another part of the model; only its shape is known."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        # Not a parameter: nothing is to be loaded for it.
        self.__dict__["weight"] = torch.empty(whole.weight.shape, dtype=whole.weight.dtype, device="meta")


def keep_part(model: Any, part: ModelPart) -> None:
    norm = final_norm(model.config.to_dict())
    assert norm is not None, "the layers of other models may be called otherwise"
    setattr(model, WHOLE, in_model_order(model, linear_modules(model), expert_products_of(model)))
    decoder = model.base_model
    if not part.is_first and hasattr(decoder, "embedding_multiplier"):
        # Granite's decoder multiplies whatever enters it, and here enters what the first part has multiplied.
        decoder.embedding_multiplier = 1.0
    for layer in range(part.num_layers):
        if not part.first <= layer < part.end:
            decoder.layers[layer] = AbsentLayer(decoder.layers[layer])
    is_tied = bool(model.config.tie_word_embeddings)
    setattr(model, TIED, is_tied)
    if not part.is_first and not (part.is_last and is_tied):
        model.set_input_embeddings(AbsentWeight(model.get_input_embeddings()))
    if not part.is_last:
        setattr(decoder, norm, nn.Identity())
        model.set_output_embeddings(AbsentWeight(model.get_output_embeddings()))
        # Nothing is left that could be tied.
        config, own = model.config, copy.deepcopy(model.config)
        own.tie_word_embeddings = False
        for module in model.modules():
            if getattr(module, "config", None) is config:
                module.config = own
        model.all_tied_weights_keys = {}


def plain_parameter(model: nn.Module) -> nn.Parameter:
    """A parameter with the device and the type of a model. Linears of layers may be quantised, or on other devices."""
    return next(own for name, own in model.named_parameters() if ".frozen." not in name)


def take_out_linears(model: Any) -> None:
    """Removes the weights of all linears except the output head from a transformers model; their shapes remain."""
    for linear in linear_modules(model).values():
        weight = linear._parameters.pop("weight")
        assert weight is not None
        linear.__dict__["weight"] = torch.empty(weight.shape, dtype=weight.dtype, device="meta")


def model_class_of(kind: Any, reduce: Callable[[Any], None]) -> Any:
    """A transformers class whose models are made without the weights that `reduce` removes."""

    def make(self: Any, config: Any, *args: Any, **options: Any) -> None:
        kind.__init__(self, config, *args, **options)
        reduce(self)

    return type(kind.__name__, (kind,), {"__init__": make, "__module__": kind.__module__})


def has_per_layer_inputs(model: Any) -> bool:
    """True if every layer of a model has embeddings of its own (Gemma 4)."""
    return bool(getattr(model.config, "hidden_size_per_layer_input", 0))


def inputs_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, routing: Routing) -> InputRows:
    embeddings: Any = model.get_input_embeddings()
    width = int(embeddings.weight.shape[1])

    def embed(ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = embeddings(ids.to(model.device))
        return embedded

    inputs = InputRows(width, routing, embed, lambda text: list(tokenizer.encode(text)))
    inputs.weight = embeddings.weight
    return inputs


def keys_and_values_of(model: PreTrainedModel, part: ModelPart | None, routing: Routing) -> dict[str, KeyValueRows]:
    config = model.config.to_dict()
    if not is_described(config):
        return {}
    sizes = describe(config).sizes
    width = 2 * sizes.num_kv_heads * sizes.head_size
    layers = range(sizes.num_layers) if part is None else range(part.first, part.end)
    return {layer_path(layer): KeyValueRows(layer, width, routing) for layer in layers}


def block_paths_of(model: PreTrainedModel) -> list[str]:
    config = model.config.to_dict()
    if not is_described(config):
        return []
    sizes, decoder = describe(config).sizes, model.base_model_prefix
    return [f"{decoder}.layers.{layer}.{name}" for layer in range(sizes.num_layers) for name in sizes.form.blocks]


def blocks_of(model: PreTrainedModel, paths: Sequence[str], routing: Routing) -> dict[str, BlockOutput]:
    modules, config = dict(model.named_modules()), model.config.to_dict()
    return {path: BlockOutput(modules[path], config["hidden_size"], routing) for path in paths if path in modules}


AnySite = SlotLinear | RowSite | ExpertSite


class BackboneSites:
    def __init__(
        self,
        model: PreTrainedModel,
        part: ModelPart | None,
        linears: Mapping[str, SlotLinear],
        experts: Mapping[str, ExpertSite],
        inputs: RowSite,
    ) -> None:
        """`part`: what `model` is of a whole one, if not all; targets are then chosen among the whole model's."""
        self.linears = linears
        self.experts = experts
        """The products of routed experts, by path."""
        self._expert_weights = expert_weights(model)
        self._left_out = spared(model.config.model_type)
        self._others = [path for path in linears if is_named(path, self._left_out)]
        products: dict[str, SlotLinear | ExpertSite] = {**linears, **experts}
        blocks = block_paths_of(model)
        self._sites: dict[Attachment, Mapping[str, AnySite]] = {
            Attachment.LINEAR: {path: products[path] for path in in_model_order(model, linears, experts)},
            # Outputs of attention and MLP blocks; none for families without a description.
            Attachment.BLOCK_OUTPUT: blocks_of(model, blocks, inputs.routing),
            Attachment.INPUT: {INPUT_PATH: inputs} if part is None or part.is_first else {},
            Attachment.KEYS_AND_VALUES: keys_and_values_of(model, part, inputs.routing),
        }
        self._paths = {kind: list(sites) for kind, sites in self._sites.items()}
        if part is not None:
            layers = [layer_path(layer) for layer in range(part.num_layers)]
            whole = {Attachment.LINEAR: getattr(model, WHOLE), Attachment.BLOCK_OUTPUT: blocks}
            self._paths = {**whole, Attachment.INPUT: [INPUT_PATH], Attachment.KEYS_AND_VALUES: layers}

    def of(self, attachment: Attachment) -> Mapping[str, AnySite]:
        return self._sites[attachment]

    def all(self) -> Iterable[AnySite]:
        return (site for sites in self._sites.values() for site in sites.values())

    def paths_for(self, method: Method) -> list[str]:
        """All sites of a method, those of other parts of the model too."""
        return self._paths[method.attachment]

    def shapes_for(self, method: Method) -> dict[str, LinearShape]:
        """All sites for adapters of a method by path, as (out, in)."""
        return _shapes(self._sites[method.attachment])

    def targets(self, spec: AdapterSpec) -> list[str]:
        """Paths of the sites that an adapter is on, those of other parts of the model too."""
        refuse_experts(spec, self._expert_weights)
        method = method_of(spec)
        return choose_modules(spec, method.attachment, self.paths_for(method), self._left_out)

    def targeted(self, spec: AdapterSpec) -> dict[str, AnySite]:
        """The sites here that an adapter is on."""
        sites = self._sites[method_of(spec).attachment]
        return {path: sites[path] for path in self.targets(spec) if path in sites}

    def shapes(self, spec: AdapterSpec, paths: Iterable[str] | None = None) -> dict[str, LinearShape]:
        """Shapes of the sites here that an adapter is on, or of those at `paths`."""
        if paths is None:
            return _shapes(self.targeted(spec))
        return _shapes(self.stored(spec, paths))

    def stored(self, spec: AdapterSpec, paths: Iterable[str]) -> dict[str, AnySite]:
        """The sites of an adapter's file."""
        sites = self._sites[method_of(spec).attachment]
        return {path: sites[path] for path in paths}

    def describe_targets(self, spec: AdapterSpec) -> str | None:
        """What an adapter trains and what stays frozen; None where all linears are alike."""
        if not self.experts and not self._others:
            return None
        targets = self.targets(spec)
        names = sorted({path.rpartition(".")[2] for path in targets if not is_expert_path(path)})
        frozen = sorted({path.rpartition(".")[2] for path in self._others if path not in targets})
        if self.experts and spec.experts == "none":
            frozen.append("routed experts (experts: shared, separate or full trains them)")
        experts_too = [f"routed experts ({spec.experts_in_words})"] if spec.experts_in_words else []
        trained = f"trains {listed([*names, *experts_too])}"
        return f"{trained}; frozen: {listed(frozen)}" if frozen else trained

    def num_parameters(self, spec: AdapterSpec) -> int:
        """Parameters of an adapter, without rows of tokens."""
        method = method_of(spec)
        shapes = (shape for path, site in self.shapes(spec).items() for shape in method.shapes(spec, path, site))
        return sum(math.prod(shape) for shape in shapes)

    def unusual_targets(self, specs: Iterable[AdapterSpec]) -> set[str]:
        """Paths that these adapters are on and `all-linear` leaves out: routed experts, and linears such as routers."""
        unusual = {*self.experts, *self._others}
        return {path for spec in specs for path in self.targets(spec) if path in unusual} if unusual else set()

    def saved_width(self, spec: AdapterSpec) -> int:
        """Numbers per row that an adapter without kernels keeps for the backward pass."""
        method = method_of(spec)
        return sum(method.saved_width(spec, path, shape) for path, shape in self.shapes(spec).items())


def _shapes(sites: Mapping[str, AnySite]) -> dict[str, LinearShape]:
    return {path: site.shape for path, site in sites.items()}


NUM_NUMBERS = 64
"""Number of elements of the first and of the last row of every tensor."""


def weight_sample(model: nn.Module) -> str:
    """A digest of some numbers of every tensor, their names and shapes; another model or version has another one."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        if tensor.numel():
            for index in (0, -1):
                row = tensor[(index,) * (tensor.dim() - 1)] if tensor.dim() else tensor.reshape(1)
                digest.update(row[:NUM_NUMBERS].detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
