"""Virtual tokens in PEFT's files: one tensor `prompt_embeddings`, and the keys of PEFT 0.21's configs.

A prompt's is (V, D). A prefix's is (V, 2 · layers · width), per virtual token the keys and the values of every layer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from weft.adapters.method import ModuleTensors, PeftFormat
from weft.errors import AdapterFileError
from weft.settings.fields import describe
from weft.spec import AdapterSpec

TENSOR = "prompt_embeddings"
INPUT_PATH = "inputs"
"""Where a prompt sits."""
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
    """Where a prefix sits in one layer."""
    return f"layers.{layer}.keys_and_values"


class VirtualTokenFiles(PeftFormat):
    """What both kinds have in common."""

    in_peft = True
    suffixes: Mapping[str, str] = {"rows": TENSOR}
    defaults: Mapping[str, Any]
    title: str

    def check_config(self, config: Mapping[str, Any], where: str) -> None:
        """Needs the number of virtual tokens, for a model of one decoder."""
        count = config.get("num_virtual_tokens")
        if not isinstance(count, int) or count < 1:
            raise AdapterFileError(f"num_virtual_tokens is {describe(count)}; at least 1 is needed.", where=where)
        if config.get("num_transformer_submodules") not in (None, 1):
            raise AdapterFileError("num_transformer_submodules is not 1, as a decoder's is.", where=where)

    def check_tensors(self, spec: AdapterSpec, path: str, tensors: ModuleTensors, where: str) -> None:
        """As many rows as the config says."""
        if tensors[0].shape[0] != spec.num_virtual_tokens:
            found = f"{TENSOR} has {tensors[0].shape[0]} rows"
            raise AdapterFileError(f"{found}; its config says {spec.num_virtual_tokens}.", where=where)

    def linear_shape(self, tensors: ModuleTensors) -> tuple[int | None, int | None]:
        """Both are the width of a row."""
        return tensors[0].shape[1], tensors[0].shape[1]

    def what_it_is(self, name: str) -> str:
        """Only one tensor can be read."""
        return f"which is not {TENSOR}"

    def summary(self, spec: AdapterSpec) -> str:
        """How many there are."""
        return f"{spec.num_virtual_tokens} virtual tokens"

    def _only(self, tensors: Mapping[str, torch.Tensor], where: str) -> torch.Tensor:
        """The one tensor of the file, of two dimensions."""
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
    """What PEFT's prompt tuning writes."""

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
        """The number of virtual tokens; how they began is said only where PEFT can read it without a tokenizer."""
        start = spec.prompt_tuning_init if spec.prompt_tuning_init != "text" else "random"
        return {"num_virtual_tokens": spec.num_virtual_tokens, "prompt_tuning_init": start.upper()}

    def settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The number of virtual tokens."""
        return {"num_virtual_tokens": config["num_virtual_tokens"]}

    def join(self, tensors: Mapping[str, ModuleTensors]) -> dict[str, torch.Tensor]:
        """The file's one tensor."""
        ((rows,),) = tensors.values()
        return {TENSOR: rows}

    def part(
        self, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], where: str
    ) -> dict[str, ModuleTensors]:
        """The same by places."""
        return {INPUT_PATH: (self._only(tensors, where),)}


class PrefixFiles(VirtualTokenFiles):
    """What PEFT's prefix tuning writes."""

    peft_type = "PREFIX_TUNING"
    title = "prefix tuning"
    defaults: Mapping[str, Any] = {
        **_SHARED,
        "encoder_hidden_size": None,
        "init_weights": None,
        "peft_type": "PREFIX_TUNING",
        "prefix_projection": False,
    }
    refused: Mapping[str, str] = {"prefix_projection": "its encoder cannot be had back from what it made"}

    def config(self, spec: AdapterSpec, target_names: Collection[str], paths: Collection[str]) -> dict[str, Any]:
        """The numbers of virtual tokens and of layers."""
        start = "zero" if spec.init_prefix_weights == "zero" else None
        return {"init_weights": start, "num_layers": len(paths), "num_virtual_tokens": spec.num_virtual_tokens}

    def settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The number of virtual tokens, and the start."""
        start = "zero" if config.get("init_weights") == "zero" else "random"
        return {"num_virtual_tokens": config["num_virtual_tokens"], "init_prefix_weights": start}

    def join(self, tensors: Mapping[str, ModuleTensors]) -> dict[str, torch.Tensor]:
        """The file's one tensor, layer after layer."""
        return {TENSOR: torch.cat([tensors[layer_path(layer)][0] for layer in range(len(tensors))], dim=1)}

    def part(
        self, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], where: str
    ) -> dict[str, ModuleTensors]:
        """The same by layers."""
        rows, count = self._only(tensors, where), config.get("num_layers")
        if not isinstance(count, int) or count < 1 or rows.shape[1] % (2 * count):
            raise AdapterFileError(
                f"{TENSOR} has rows of {rows.shape[1]}, which are not keys and values of {describe(count)} layers.",
                where=where,
            )
        return {layer_path(layer): (part.contiguous(),) for layer, part in enumerate(rows.chunk(count, dim=1))}
