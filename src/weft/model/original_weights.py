"""The weights of a quantised backbone as they were: read again from the model's files, one at a time.

A backbone keeps only what it stores. Whoever wants to know what was lost by that reads the files anew, and can be sure
of what it got: stored in the same way it must give the very numbers that the backbone has.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from weft.adapters.frozen import FrozenWeight, quantise
from weft.adapters.linear import SlotLinear
from weft.adapters.place_share import SiteShare
from weft.errors import ModelError
from weft.model.model_files import INDEX

SINGLE = "model.safetensors"


class OriginalWeights:
    """The weights in the files of one model."""

    def __init__(self, name: str, path: str, prefix: str, dtype: torch.dtype) -> None:
        """`name`: what the user calls the model; `path`: a directory or a Hub name; `prefix`: of the decoder's paths,
        which some files leave out; `dtype`: that the backbone has read them in."""
        self._where, self._path = f"base_model {name}", path
        self._prefix, self._dtype = f"{prefix}.", dtype

    def find(self, path: str, shape: tuple[int, int]) -> torch.Tensor:
        """The weight (O, D) of a linear of that shape, as the model's family writes it."""
        found = next(self._found(path), None)
        if found is None:
            raise ModelError(f"{path}.weight is not in the model's files.", where=self._where)
        if tuple(found.shape) != shape:
            given = f"{path}.weight has the shape {tuple(found.shape)}"
            raise ModelError(f"{given}; config.json asks for {shape}.", where=self._where)
        return found.to(self._dtype).contiguous()

    def read(self, path: str, linear: SlotLinear) -> torch.Tensor:
        """The weight (O, D) of a linear, of which some or all is now stored, on the same device."""
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
        """Whether the files have weights of both modules, and not the same numbers."""
        found = [next(self._found(path), None) for path in (one, other)]
        weights = [weight.to(self._dtype) for weight in found if weight is not None]
        return len(weights) == 2 and not torch.equal(*weights)

    def _found(self, path: str) -> Iterator[torch.Tensor]:
        """What may be the weight: files may leave the decoder's name out, and hold it the other way round."""
        for name in dict.fromkeys((f"{path}.weight", f"{path.removeprefix(self._prefix)}.weight")):
            if name in self._files:
                with safe_open(self._files[name], framework="pt") as opened:
                    weight: torch.Tensor = opened.get_tensor(name)
                yield from (weight, weight.t())

    @functools.cached_property
    def _files(self) -> dict[str, str]:
        """The file that each tensor is in; none where they are not safetensors."""
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
        """Where a file of the model lies, if it has it."""
        if os.path.isdir(self._path):
            file = Path(self._path) / name
            return str(file) if file.is_file() else None
        from transformers.utils.hub import cached_file

        # It has been loaded from there a moment ago, so nothing is fetched.
        found: Any = cached_file(self._path, name, local_files_only=True, _raise_exceptions_for_missing_entries=False)
        return None if found is None else str(found)


def _is_stored_as(weight_OD: torch.Tensor, stored: FrozenWeight, share: SiteShare) -> bool:
    """Whether storing a weight gives these very bytes of what is here of it."""
    made = quantise(weight_OD, stored.kind, copies=1).cut(share.outputs, share.inputs).stored
    # Not every device compares 8-bit floats.
    return all(x.view(torch.uint8).equal(stored.stored[name].view(torch.uint8)) for name, x in made.items())
