"""Prompt tuning (Lester et al., 2021) and prefix tuning (Li and Liang, 2021), without an encoder of their own.

prompt_tuning   V rows of the residual stream's width, which the first layer sees in front of a sample's embeddings.
prefix_tuning   per layer V keys and values, which attention sees in front of a sample's own.

Files have the keys of PEFT 0.21's configs and one tensor `prompt_embeddings`: a prompt's is (V, D); a prefix's is
(V, 2 · layers · width), per virtual token the keys and the values of every layer.

Shape suffixes: T rows of the microbatch, V virtual tokens, D features of a row.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from weft.adapters.adapter import Adapter
from weft.adapters.method import (
    Attachment,
    Change,
    CostRanks,
    KernelCopy,
    LinearShape,
    Method,
    ModuleTensors,
    PeftFormat,
    Site,
    SlotWeights,
)
from weft.adapters.routing import Routing, SlotRows
from weft.adapters.sites import InputRows, KeyValueRows
from weft.errors import AdapterFileError, ConfigError
from weft.kernels.methods.parts import LeadingRows, OtherParts
from weft.settings import describe
from weft.spec import AdapterSpec


@dataclass
class VirtualRows(SlotWeights):
    rows_VD: torch.Tensor
    grad_VD: torch.Tensor
    columns: torch.Tensor | None
    """Columns on this device if the others are on other devices; None: all."""

    def here(self, x_VD: torch.Tensor) -> torch.Tensor:
        return x_VD if self.columns is None else x_VD.index_select(1, self.columns)

    def forward(self, x_TD: torch.Tensor, y_TO: torch.Tensor, rows: SlotRows, routing: Routing) -> None:
        """Writes its rows at the start of every sample; samples that continue from a cache have them already."""
        for begin in rows.begins:
            y_TO[begin : begin + len(self.rows_VD)] = self.rows_VD.to(y_TO.dtype)

    def backward(
        self, x_TD: torch.Tensor, dy_TO: torch.Tensor, dx_TD: torch.Tensor | None, rows: SlotRows, kept: None
    ) -> None:
        for begin in rows.begins:
            own = slice(begin, begin + len(self.rows_VD))
            self.grad_VD.add_(dy_TO[own].float())
            if dx_TD is not None:
                dx_TD[own] = 0


TENSOR = "prompt_embeddings"
INPUT_PATH = "inputs"
_SHARED: dict[str, Any] = {
    "auto_mapping": None,
    "base_model_name_or_path": None,
    "inference_mode": True,
    "modules_to_save": None,
    "num_attention_heads": None,
    "num_layers": None,
    "num_transformer_submodules": 1,
    "num_virtual_tokens": None,
    "revision": None,
    "task_type": "CAUSAL_LM",
    "token_dim": None,
}


def layer_path(layer: int) -> str:
    return f"layers.{layer}.keys_and_values"


class VirtualTokenFiles(PeftFormat):
    in_peft = True
    suffixes: Mapping[str, str] = {"rows": TENSOR}
    defaults: Mapping[str, Any]
    title: str

    def check_config(self, config: Mapping[str, Any], where: str) -> None:
        count = config.get("num_virtual_tokens")
        if not isinstance(count, int) or count < 1:
            raise AdapterFileError(f"num_virtual_tokens is {describe(count)}; at least 1 is needed.", where=where)
        if config.get("num_transformer_submodules") not in (None, 1):
            raise AdapterFileError("num_transformer_submodules is not 1, as a decoder's is.", where=where)

    def check_tensors(self, spec: AdapterSpec, path: str, tensors: ModuleTensors, where: str) -> None:
        if tensors[0].shape[0] != spec.num_virtual_tokens:
            found = f"{TENSOR} has {tensors[0].shape[0]} rows"
            raise AdapterFileError(f"{found}; its config has {spec.num_virtual_tokens}.", where=where)

    def linear_shape(self, tensors: ModuleTensors) -> tuple[int | None, int | None]:
        return tensors[0].shape[1], tensors[0].shape[1]

    def what_it_is(self, name: str) -> str:
        return f"which is not {TENSOR}"

    def summary(self, spec: AdapterSpec) -> str:
        return f"{spec.num_virtual_tokens} virtual tokens"

    def _only(self, tensors: Mapping[str, torch.Tensor], where: str) -> torch.Tensor:
        for name in tensors:
            if name != TENSOR:
                raise AdapterFileError(f"holds {name!r}, {self.what_it_is(name)}.", where=where)
        if TENSOR not in tensors:
            raise AdapterFileError(f"holds no {self.title} weights.", where=where)
        rows = tensors[TENSOR]
        if rows.dim() != 2 or not rows.numel():
            raise AdapterFileError(f"{TENSOR} is {tuple(rows.shape)}; expected rows of one width.", where=where)
        return rows


class PromptFiles(VirtualTokenFiles):
    peft_type = "PROMPT_TUNING"
    title = "prompt tuning"
    defaults: Mapping[str, Any] = {
        **_SHARED,
        "peft_type": "PROMPT_TUNING",
        "prompt_tuning_init": "RANDOM",
        "prompt_tuning_init_text": None,
        "tokenizer_kwargs": None,
        "tokenizer_name_or_path": None,
    }

    def config(self, spec: AdapterSpec, target_names: Collection[str], paths: Collection[str]) -> dict[str, Any]:
        """The number of virtual tokens; their start is only written if PEFT can read it without a tokenizer."""
        start = spec.prompt_tuning_init if spec.prompt_tuning_init != "text" else "random"
        return {"num_virtual_tokens": spec.num_virtual_tokens, "prompt_tuning_init": start.upper()}

    def settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {"num_virtual_tokens": config["num_virtual_tokens"]}

    def join(self, tensors: Mapping[str, ModuleTensors]) -> dict[str, torch.Tensor]:
        ((rows,),) = tensors.values()
        return {TENSOR: rows}

    def part(
        self, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], where: str
    ) -> dict[str, ModuleTensors]:
        return {INPUT_PATH: (self._only(tensors, where),)}


class PrefixFiles(VirtualTokenFiles):
    peft_type = "PREFIX_TUNING"
    title = "prefix tuning"
    defaults: Mapping[str, Any] = {
        **_SHARED,
        "encoder_hidden_size": None,
        "init_weights": None,
        "peft_type": "PREFIX_TUNING",
        "prefix_projection": False,
    }
    refused: Mapping[str, str] = {"prefix_projection": "its encoder cannot be restored from its output"}

    def config(self, spec: AdapterSpec, target_names: Collection[str], paths: Collection[str]) -> dict[str, Any]:
        start = "zero" if spec.init_prefix_weights == "zero" else None
        return {"init_weights": start, "num_layers": len(paths), "num_virtual_tokens": spec.num_virtual_tokens}

    def settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        start = "zero" if config.get("init_weights") == "zero" else "random"
        return {"num_virtual_tokens": config["num_virtual_tokens"], "init_prefix_weights": start}

    def join(self, tensors: Mapping[str, ModuleTensors]) -> dict[str, torch.Tensor]:
        return {TENSOR: torch.cat([tensors[layer_path(layer)][0] for layer in range(len(tensors))], dim=1)}

    def part(
        self, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], where: str
    ) -> dict[str, ModuleTensors]:
        rows, count = self._only(tensors, where), config.get("num_layers")
        if not isinstance(count, int) or count < 1 or rows.shape[1] % (2 * count):
            raise AdapterFileError(
                f"{TENSOR} has rows of {rows.shape[1]}, which are not keys and values of {describe(count)} layers.",
                where=where,
            )
        return {layer_path(layer): (part.contiguous(),) for layer, part in enumerate(rows.chunk(count, dim=1))}


class RowsCopy(KernelCopy):
    """The rows as kernels read them: those of this device's heads, if other devices have others."""

    def __init__(self, adapter: Adapter, dtype: torch.dtype, weights: Mapping[str, VirtualRows]) -> None:
        super().__init__(adapter)
        self._weights = weights
        self._parts = {path: w for path, w in weights.items() if w.columns is not None}
        """The weights with only some columns on this device: kernels leave their gradients in separate buffers."""
        own = {path: w.here(w.rows_VD).to(dtype) for path, w in weights.items()}
        grads = {path: w.here(w.grad_VD).zero_() if path in self._parts else w.grad_VD for path, w in weights.items()}
        self.others = OtherParts(rows={path: LeadingRows(own[path], grads[path]) for path in weights})

    def copy_weights(self) -> None:
        for path, w in self._weights.items():
            self.others.rows[path].rows_VN.copy_(w.here(w.rows_VD))

    def collect(self) -> None:
        for path, w in self._parts.items():
            assert w.columns is not None
            w.grad_VD.index_add_(1, w.columns, self.others.rows[path].grad_VN)
        self.clear_gradients()

    def clear_gradients(self) -> None:
        for path in self._parts:
            self.others.rows[path].grad_VN.zero_()


class VirtualTokens(Method):
    groups: tuple[str, ...] = ("rows",)

    def shapes(self, spec: AdapterSpec, path: str, linear: LinearShape) -> Sequence[tuple[int, ...]]:
        return ((spec.num_virtual_tokens, linear[1]),)

    def weights(
        self, spec: AdapterSpec, path: str, site: Site, params: ModuleTensors, grads: ModuleTensors
    ) -> VirtualRows:
        columns = site.columns_here(params[0].device) if isinstance(site, KeyValueRows) else None
        return VirtualRows(params[0], grads[0], columns)

    def kernel_copy(self, adapter: Adapter, dtype: torch.dtype) -> KernelCopy:
        return RowsCopy(adapter, dtype, cast(dict[str, VirtualRows], adapter.modules))


class PromptTuning(VirtualTokens):
    attachment = Attachment.INPUT
    kernel_changes: tuple[Change, ...] = (("rows", "input"),)
    files: PeftFormat = PromptFiles()

    def initial(self, spec: AdapterSpec, path: str, site: Site, generator: torch.Generator) -> ModuleTensors:
        """PEFT's initial values, by `prompt_tuning_init`: normal numbers, or embeddings of tokens."""
        assert isinstance(site, InputRows)
        count = spec.num_virtual_tokens
        if spec.prompt_tuning_init == "random":
            return (torch.randn(count, site.width, generator=generator),)
        if spec.prompt_tuning_init == "sample_vocab":
            assert site.weight is not None
            ids = torch.randint(0, site.weight.shape[0], (count,), generator=generator)
        else:
            given = site.tokens(spec.prompt_tuning_init_text or "")
            if not given:
                raise ConfigError("is no token of the backbone's.", where="adapter.prompt_tuning_init_text")
            ids = torch.tensor([given[i % len(given)] for i in range(count)])
        return (site.embed(ids).float().cpu(),)

    def cost_ranks(self, spec: AdapterSpec) -> CostRanks:
        """A layer's linears have more than eight times the residual stream's width of inputs and outputs."""
        return CostRanks(1, -(-spec.num_virtual_tokens // 8))


class PrefixTuning(VirtualTokens):
    attachment = Attachment.KEYS_AND_VALUES
    kernel_changes: tuple[Change, ...] = (("rows", "kv"),)
    files: PeftFormat = PrefixFiles()

    def initial(self, spec: AdapterSpec, path: str, site: Site, generator: torch.Generator) -> ModuleTensors:
        shape = (spec.num_virtual_tokens, site.out_features)
        return (torch.zeros(shape) if spec.init_prefix_weights == "zero" else torch.randn(shape, generator=generator),)

    def cost_ranks(self, spec: AdapterSpec) -> CostRanks:
        """Keys and values are at most twice as wide as the residual stream; see prompt tuning."""
        return CostRanks(1, -(-spec.num_virtual_tokens // 4))


METHODS: dict[str, Method] = {"prompt_tuning": PromptTuning(), "prefix_tuning": PrefixTuning()}
