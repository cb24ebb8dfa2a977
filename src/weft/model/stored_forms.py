"""The tensors in a model's files, whatever form they are stored in.

    plain     a tensor is its numbers
    fp8       W (O, D) as 8-bit floats, with a factor for every block of 128 x 128 or for all of it:
              W = w8 · `weight_scale_inv`
    mxfp4     weights of experts: a block of 32 numbers is 16 bytes, two codes in each, the lower half first; and one
              power of two: value · 2 ** (`_scales` - 127). In files (E, O, D / 32, 16); in the model (E, D, O)

Only torch is needed, on any device. Every number of mxfp4 is one of bfloat16; those of fp8 are rounded once.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from safetensors import safe_open

from weft.errors import ModelError
from weft.model.resolve import KEY_MAPPING
from weft.model.source import INDEX

SINGLE = "model.safetensors"
STORED_FORMS = ("fp8", "mxfp4")
_SCALE, _BLOCKS, _SCALES = "_scale_inv", "_blocks", "_scales"
_UNUSED = re.compile(r"(activation_scale|input_scale|k_scale|v_scale)$")
"""Factors for activations, which stay in the backbone's own type here."""
_CODES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_BIAS = 127
"""The scale that is one."""


def stored_form(config: Any, where: str) -> str | None:
    """The form that a model's configuration states for its weights; None: plain. ModelError for an unknown one."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    values = found if isinstance(found, Mapping) else found.to_dict()
    method = getattr(values.get("quant_method"), "value", values.get("quant_method"))
    if method not in STORED_FORMS:
        accepted = f"{' and '.join(STORED_FORMS)}, or plain weights"
        raise ModelError(f"its weights are stored as {method}; Weft reads {accepted}.", where=where)
    return str(method)


@dataclass(frozen=True)
class UnreadTensor:
    """A tensor in files, which each `[...]` reads. transformers takes these for slices of safetensors files,
    and moves each to its device before it reads many others."""

    read: Callable[[], torch.Tensor]

    def __getitem__(self, index: EllipsisType) -> torch.Tensor:
        return self.read()


class ModelFiles:
    """The safetensors files of a model directory or a Hub model."""

    def __init__(self, path: str, *, fetches: bool = False) -> None:
        """`fetches`: files of a Hub model may be downloaded."""
        self._path, self._fetches = path, fetches

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The numbers of a tensor, rounded to a type if they are stored in another form."""
        found = self._read(name)
        scale = f"{name}{_SCALE}"
        if scale in self:
            return _of_blocks(found, self._read(scale)).to(dtype or torch.bfloat16)
        return found

    @property
    def paths(self) -> list[str]:
        return list(dict.fromkeys(self._files.values()))

    def tensors(self, dtype: torch.dtype, path: str | None = None) -> Iterator[tuple[str, UnreadTensor]]:
        """All tensors by name, or those of one file; of a type if they are not stored plain."""
        for name, file in self._files.items():
            if name.endswith((_SCALE, _SCALES)) or _UNUSED.search(name) or path not in (None, file):
                continue
            yield name.removesuffix(_BLOCKS), UnreadTensor(functools.partial(self._whole, name, dtype))

    def state(self, dtype: torch.dtype) -> dict[str, UnreadTensor]:
        """All tensors of the text model by their names there."""
        return {text_name(name): tensor for name, tensor in self.tensors(dtype)}

    def _whole(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        if not name.endswith(_BLOCKS):
            return self.tensor(name, dtype)
        return of_mxfp4(self._read(name), self._read(name.removesuffix(_BLOCKS) + _SCALES), dtype)

    def other(self, name: str) -> Path | None:
        """A file beside the weights."""
        found = self._file(name)
        return None if found is None else Path(found)

    def _read(self, name: str) -> torch.Tensor:
        with safe_open(self._files[name], framework="pt") as opened:
            found: torch.Tensor = opened.get_tensor(name)
        return found

    @functools.cached_property
    def _files(self) -> dict[str, str]:
        """The file of each tensor; empty if the files are not safetensors."""
        index = self._file(INDEX)
        if index is not None:
            named: dict[str, str] = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
            files = {file: self._file(file) for file in set(named.values())}
            return {name: found for name, file in named.items() if (found := files[file]) is not None}
        single = self._file(SINGLE)
        if single is None:
            return {}
        with safe_open(single, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), single)

    def _file(self, name: str) -> str | None:
        if os.path.isdir(self._path):
            file = Path(self._path) / name
            return str(file) if file.is_file() else None
        from transformers.utils.hub import cached_file

        found: Any = cached_file(
            self._path, name, local_files_only=not self._fetches, _raise_exceptions_for_missing_entries=False
        )
        return None if found is None else str(found)


def text_name(name: str) -> str:
    """The name in the text model of a tensor in the files of a whole one."""
    for pattern, short in KEY_MAPPING.items():
        name = re.sub(pattern, short, name)
    return name


def _of_blocks(w8_OD: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The numbers of 8-bit floats in fp32; `scale` has one factor for each block, or one for all."""
    values_OD = w8_OD.float()
    if scale.numel() == 1:
        return values_OD * scale.float()
    factors = scale.float()
    for dim in (-2, -1):
        number = w8_OD.shape[dim]
        # Those at the end may be smaller.
        block = 1 << (-(-number // scale.shape[dim]) - 1).bit_length()
        factors = factors.repeat_interleave(block, dim).narrow(dim, 0, number)
    return values_OD * factors


def of_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weights (E, D, O) of experts from their blocks (E, O, D / 32, 16) and scales (E, O, D / 32)."""
    codes = torch.tensor(_CODES, dtype=dtype, device=blocks.device)
    halves = torch.stack([codes[(blocks & 15).int()], codes[(blocks >> 4).int()]], dim=-1).flatten(-2)
    weights = torch.ldexp(halves, scales[..., None].int() - _BIAS)
    return weights.flatten(-2).transpose(1, 2).contiguous()
