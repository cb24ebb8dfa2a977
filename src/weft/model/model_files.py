"""What must hold of a model directory before anything is made of it; each flaw has a sentence that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from weft.errors import ModelError

INDEX = "model.safetensors.index.json"
_LFS = b"version https://git-lfs"
"""How a pointer begins that Git leaves in the place of a large file."""


def check_directory(path: Path) -> None:
    """ModelError if a directory holds no model that could be loaded, its weights apart."""
    where = f"base_model {path}"
    config = path / "config.json"
    if not config.is_file():
        raise ModelError("the directory has no config.json, so it is not a Hugging Face model.", where=where)
    for file in sorted(path.iterdir()):
        if file.suffix in (".json", ".model", ".safetensors") and file.is_file():
            _refuse_pointer(file, where)
    settings = _read_json(config, where)
    if not isinstance(settings, dict) or "model_type" not in settings:
        raise ModelError("config.json names no model_type.", where=where)
    if "auto_map" in settings:
        raise ModelError(
            "the model brings code of its own (auto_map); Weft runs no code from model files.", where=where
        )
    if not list(path.glob("*.safetensors")):
        pickled = " Convert its .bin files first." if list(path.glob("*.bin")) else ""
        raise ModelError(f"the directory has no .safetensors weights.{pickled}", where=where)


def check_weight_files(path: Path) -> None:
    """ModelError if a weights file is missing, cut short or something else; reads their headers only."""
    where = f"base_model {path}"
    index = path / INDEX
    if index.is_file():
        named = _read_json(index, where)
        named = named.get("weight_map") if isinstance(named, dict) else None
        if not isinstance(named, dict):
            raise ModelError(f"{INDEX} does not say which file has which weights.", where=where)
        missing = sorted({str(name) for name in named.values() if not (path / str(name)).is_file()})
        if missing:
            more = f", nor are {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ModelError(f"{missing[0]}, which {INDEX} names, is not there{more}.", where=where)
    for file in sorted(path.glob("*.safetensors")):
        _check_header(file, where)


def _check_header(file: Path, where: str) -> None:
    """A safetensors file begins with the length of its header, which says where its last tensor ends."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header: Any = None
        if 0 < length <= size - 8:
            try:
                header = json.loads(opened.read(length))
            except ValueError:
                header = None
    if not isinstance(header, dict):
        raise ModelError(f"{file.name} is not a safetensors file, or its beginning is damaged.", where=where)
    tensors = [entry for name, entry in header.items() if name != "__metadata__"]
    ends = [entry["data_offsets"][1] for entry in tensors if isinstance(entry, dict) and entry.get("data_offsets")]
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        raise ModelError(f"{file.name} has {size} bytes; its header says {expected}. Fetch it again.", where=where)


def _refuse_pointer(file: Path, where: str) -> None:
    with file.open("rb") as opened:
        if opened.read(len(_LFS)) == _LFS:
            raise ModelError(f"{file.name} is a Git LFS pointer, not the file itself; run `git lfs pull`.", where=where)


def _read_json(file: Path, where: str) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file.name} cannot be read ({error}).", where=where) from None
