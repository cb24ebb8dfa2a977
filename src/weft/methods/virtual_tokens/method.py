"""Prompt tuning (Lester et al., 2021) and prefix tuning (Li and Liang, 2021), without an encoder of their own.

prompt_tuning   V rows of the residual stream's width, which the first layer sees in front of a sample's embeddings.
prefix_tuning   per layer V keys and values, which attention sees in front of a sample's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch

from weft.adapters.leading_rows import InputRows, KeyValueRows
from weft.adapters.method import (
    Attachment,
    Change,
    CostRanks,
    KernelCopy,
    LinearShape,
    Method,
    ModuleTensors,
    PeftFormat,
    Place,
)
from weft.errors import ConfigError
from weft.kernels.methods.parts import LeadingRows, OtherParts
from weft.methods.virtual_tokens.files import PrefixFiles, PromptFiles
from weft.methods.virtual_tokens.weights import VirtualRows
from weft.spec import AdapterSpec

if TYPE_CHECKING:
    from weft.adapters.adapter import Adapter


class RowsCopy(KernelCopy):
    """The rows as kernels read them: those of this device's heads, where other devices have others."""

    def __init__(self, adapter: Adapter, dtype: torch.dtype, places: Mapping[str, VirtualRows]) -> None:
        """`places`: by path."""
        super().__init__(adapter)
        self._places = places
        self._parts = {path: w for path, w in places.items() if w.columns is not None}
        """Of whose rows some columns are here: kernels leave the gradients of these elsewhere."""
        own = {path: w.here(w.rows_VD).to(dtype) for path, w in places.items()}
        grads = {path: w.here(w.grad_VD).zero_() if path in self._parts else w.grad_VD for path, w in places.items()}
        self.others = OtherParts(rows={path: LeadingRows(own[path], grads[path]) for path in places})

    def copy_weights(self) -> None:
        """Rounds the masters."""
        for path, w in self._places.items():
            self.others.rows[path].rows_VN.copy_(w.here(w.rows_VD))

    def collect(self) -> None:
        """Adds what kernels left elsewhere."""
        for path, w in self._parts.items():
            assert w.columns is not None
            w.grad_VD.index_add_(1, w.columns, self.others.rows[path].grad_VN)
        self.clear_gradients()

    def clear_gradients(self) -> None:
        """Those that are elsewhere."""
        for path in self._parts:
            self.others.rows[path].grad_VN.zero_()


class VirtualTokens(Method):
    """What both have in common."""

    groups: tuple[str, ...] = ("rows",)

    def has_kernels(self, spec: AdapterSpec) -> bool:
        return True

    def shapes(self, spec: AdapterSpec, path: str, linear: LinearShape) -> Sequence[tuple[int, ...]]:
        """Of the rows in one place."""
        return ((spec.num_virtual_tokens, linear[1]),)

    def weights(
        self, spec: AdapterSpec, path: str, place: Place, params: ModuleTensors, grads: ModuleTensors
    ) -> VirtualRows:
        """The rows and their gradient."""
        columns = place.columns_here(params[0].device) if isinstance(place, KeyValueRows) else None
        return VirtualRows(params[0], grads[0], columns)

    def kernel_copy(self, adapter: Adapter, dtype: torch.dtype) -> KernelCopy:
        """The rows in the type of the activations."""
        return RowsCopy(adapter, dtype, cast(dict[str, VirtualRows], adapter.modules))


class PromptTuning(VirtualTokens):
    """The method `prompt_tuning`."""

    attachment = Attachment.INPUT
    kernel_changes: tuple[Change, ...] = (("rows", "input"),)
    files: PeftFormat = PromptFiles()

    def initial(self, spec: AdapterSpec, path: str, place: Place, generator: torch.Generator) -> ModuleTensors:
        """PEFT's starting values, by `prompt_tuning_init`: normal numbers, or embeddings of tokens."""
        assert isinstance(place, InputRows)
        count = spec.num_virtual_tokens
        if spec.prompt_tuning_init == "random":
            return (torch.randn(count, place.width, generator=generator),)
        if spec.prompt_tuning_init == "sample_vocab":
            assert place.weight is not None
            ids = torch.randint(0, place.weight.shape[0], (count,), generator=generator)
        else:
            given = place.tokens(spec.prompt_tuning_init_text or "")
            if not given:
                raise ConfigError("is no token of the backbone's.", where="adapter.prompt_tuning_init_text")
            ids = torch.tensor([given[i % len(given)] for i in range(count)])
        return (place.embed(ids).float().cpu(),)

    def cost_ranks(self, spec: AdapterSpec) -> CostRanks:
        """A layer's linears have more than eight times the residual stream's width of inputs and outputs."""
        return CostRanks(1, -(-spec.num_virtual_tokens // 8))


class PrefixTuning(VirtualTokens):
    """The method `prefix_tuning`."""

    attachment = Attachment.KEYS_AND_VALUES
    kernel_changes: tuple[Change, ...] = (("rows", "kv"),)
    files: PeftFormat = PrefixFiles()

    def initial(self, spec: AdapterSpec, path: str, place: Place, generator: torch.Generator) -> ModuleTensors:
        """PEFT's starting values: normal numbers, or zeros."""
        shape = (spec.num_virtual_tokens, place.out_features)
        return (torch.zeros(shape) if spec.init_prefix_weights == "zero" else torch.randn(shape, generator=generator),)

    def cost_ranks(self, spec: AdapterSpec) -> CostRanks:
        """Keys and values are at most twice as wide as the residual stream; see prompt tuning."""
        return CostRanks(1, -(-spec.num_virtual_tokens // 4))


METHODS: dict[str, Method] = {"prompt_tuning": PromptTuning(), "prefix_tuning": PrefixTuning()}
