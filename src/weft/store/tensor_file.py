"""Safetensors files written straight from the tensors' own memory.

The bytes are those of `safetensors.torch.save`, which makes two more copies of everything and blocks all other Python
threads meanwhile. Hashing and writing here do not: training goes on in parallel.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

import torch

_NAMES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The format's name of each type, in the order in which it stores them."""


def file_pieces(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> list[bytes | memoryview]:
    """The whole file, piece by piece; the tensors must be on the CPU and must not change until it is written."""
    order = {dtype: index for index, dtype in enumerate(_NAMES)}
    named = sorted(tensors.items(), key=lambda item: (order[item[1].dtype], item[0]))
    pieces = [_memory(tensor) for _, tensor in named]
    return [_header(named, pieces, metadata), *pieces]


def sha256(pieces: Sequence[bytes | memoryview]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def _header(
    named: Sequence[tuple[str, torch.Tensor]], pieces: Sequence[memoryview], metadata: Mapping[str, str] | None
) -> bytes:
    entries: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for (name, tensor), piece in zip(named, pieces, strict=True):
        start, end = end, end + len(piece)
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _memory(tensor: torch.Tensor) -> memoryview:
    """A tensor's numbers in memory."""
    assert tensor.device.type == "cpu", "files are written from the CPU's memory"
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
