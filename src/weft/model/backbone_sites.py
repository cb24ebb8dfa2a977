"""The sites of a backbone: which of them an adapter is on, and how large it is there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from weft.adapters.experts import ExpertSite
from weft.adapters.method import Attachment, LinearShape, Method
from weft.adapters.sites import RowSite, SlotLinear
from weft.adapters.targets import choose_modules, is_named, refuse_experts
from weft.methods.registry import method_of
from weft.methods.virtual_tokens.method import INPUT_PATH, layer_path
from weft.model.model_part import WHOLE, ModelPart, block_paths_of, blocks_of, keys_and_values_of
from weft.model.packing.experts import expert_weights, in_model_order
from weft.plan.families import spared
from weft.settings import is_expert_path, listed
from weft.spec import AdapterSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
        others = [path for path in self.linears if is_named(path, self._left_out)]
        if not self.experts and not others:
            return None
        targets = self.targets(spec)
        names = sorted({path.rpartition(".")[2] for path in targets if not is_expert_path(path)})
        frozen = sorted({path.rpartition(".")[2] for path in others if path not in targets})
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

    def saved_width(self, spec: AdapterSpec) -> int:
        """Numbers per row that an adapter without kernels keeps for the backward pass."""
        method = method_of(spec)
        return sum(method.saved_width(spec, path, shape) for path, shape in self.shapes(spec).items())


def _shapes(sites: Mapping[str, AnySite]) -> dict[str, LinearShape]:
    return {path: site.shape for path, site in sites.items()}
