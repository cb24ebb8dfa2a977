"""Checkpoints: the whole state of a job at a step, verified when it is loaded.

A checkpoint is a directory `step-00000040/` with

    tensors.safetensors   parameters, optimizer moments, random states
    state.json            {"format": 1, "sha256": ..., "content": {"step": 40, "state": ..., "environment": ...,
                           "tensors": {"bytes": ..., "sha256": ...}}}

The outer sha256 is that of `content`, the inner one that of the tensors file, so a flipped bit in either is detected.
The directory appears in one rename after all its bytes are on the disk. Older checkpoints are removed only after that.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from weft.errors import CheckpointError
from weft.store import faults, json_text
from weft.store.atomic import make_directory, remove_directory, staged_directory, storage_errors, write_unsynced

FORMAT = 1
TENSORS_FILE = "tensors.safetensors"
STATE_FILE = "state.json"
_CONTENT = {"step": int, "state": dict, "environment": dict, "tensors": dict}
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    step: int
    tensors: dict[str, torch.Tensor]
    """Parameters, optimizer moments, random states, all on the CPU; they are restored bit for bit, sorted by name."""
    state: dict[str, Any]
    """All other state of the job, as plain JSON data with finite numbers."""
    environment: dict[str, Any]
    """Library versions, device and plan, which the bits depend on; also plain JSON data."""


def save_checkpoint(directory: Path, checkpoint: Checkpoint, *, keep: int) -> Path:
    """Writes the checkpoint, then removes older ones except the newest `keep`. A crash leaves the earlier checkpoints,
    or the new one as well; never less. One of the same step is replaced."""
    assert keep >= 1, "the checkpoint just written is always kept"
    assert checkpoint.step >= 0
    payload = file_pieces(checkpoint.tensors)
    text = _state_text(checkpoint, payload)
    make_directory(directory)
    path = directory / f"step-{checkpoint.step:08d}"
    with storage_errors(path):
        faults.point("checkpoint.write")
        with staged_directory(path) as staged:
            write_unsynced(staged / TENSORS_FILE, *payload)
            write_unsynced(staged / STATE_FILE, text)
        faults.point("checkpoint.prune")
        _prune(directory, checkpoint.step, keep)
    return path


def load_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in a directory, or a CheckpointError that names its problem."""
    content = _read_content(path)
    data = _read(path, TENSORS_FILE)
    size, checksum = content["tensors"].get("bytes"), content["tensors"].get("sha256")
    if len(data) != size:
        raise _damaged(path, f"{TENSORS_FILE} has {len(data)} bytes; {size} were written.")
    if hashlib.sha256(data).hexdigest() != checksum:
        raise _damaged(path, f"{TENSORS_FILE} does not have the checksum it was written with.")
    try:
        tensors = dict(sorted(load(data).items()))
    except SafetensorError as error:
        raise _damaged(path, f"{TENSORS_FILE} is not a safetensors file ({error}).") from None
    return Checkpoint(content["step"], tensors, content["state"], content["environment"])


def latest_checkpoint(directory: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that verifies, if any, and one sentence about each newer one that does not."""
    rejected: list[str] = []
    for step, path in reversed(_steps(directory)):
        try:
            checkpoint = load_checkpoint(path)
            if checkpoint.step != step:
                raise _damaged(path, f"it holds step {checkpoint.step}, not the step in its name.")
        except CheckpointError as error:
            rejected.append(str(error))
            continue
        return checkpoint, rejected
    return None, rejected


def newest_content(directory: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """State and environment of the newest checkpoint whose state.json verifies; reads no tensors."""
    for _, path in reversed(_steps(directory)):
        with suppress(CheckpointError):
            content = _read_content(path)
            return content["state"], content["environment"]
    return None


def _state_text(checkpoint: Checkpoint, payload: Sequence[bytes | memoryview]) -> str:
    content = {
        "step": checkpoint.step,
        "state": checkpoint.state,
        "environment": checkpoint.environment,
        "tensors": {"bytes": sum(map(len, payload)), "sha256": sha256(payload)},
    }
    try:
        text = json_text.dump({"format": FORMAT, "sha256": _digest(content), "content": content})
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the state of step {checkpoint.step} is not finite plain data ({error}).") from None
    # A tuple, or a number as a key, would come back as something else and the resumed job would differ.
    if json.loads(text)["content"] != content:
        raise CheckpointError(f"the state of step {checkpoint.step} would not come back from JSON as it is.")
    return text


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _read_content(path: Path) -> dict[str, Any]:
    """Contents of state.json, once its own checksum is verified."""
    try:
        outer = json_text.parse(_read(path, STATE_FILE))
    except ValueError as error:
        raise _damaged(path, f"{STATE_FILE} is not valid JSON: {error}.") from None
    if not isinstance(outer, dict) or not isinstance(outer.get("content"), dict):
        raise _damaged(path, f"{STATE_FILE} does not describe a checkpoint.")
    if outer.get("format") != FORMAT:
        raise _damaged(path, f"{STATE_FILE} has format {outer.get('format')!r}; this version of Weft reads {FORMAT}.")
    content: dict[str, Any] = outer["content"]
    if _digest(content) != outer.get("sha256"):
        raise _damaged(path, f"{STATE_FILE} does not have the checksum it was written with.")
    for key, kind in _CONTENT.items():
        if not isinstance(content.get(key), kind):
            raise _damaged(path, f"{STATE_FILE} holds no {key}.")
    return content


def _read(path: Path, name: str) -> bytes:
    try:
        return (path / name).read_bytes()
    except FileNotFoundError:
        raise _damaged(path, f"{name} is missing.") from None
    except OSError as error:
        raise _damaged(path, f"{name} cannot be read ({error.strerror}).") from None


def _damaged(path: Path, message: str) -> CheckpointError:
    return CheckpointError(message, where=str(path))


def _steps(directory: Path) -> list[tuple[int, Path]]:
    if not directory.is_dir():
        return []
    named = [(_NAME.fullmatch(path.name), path) for path in directory.iterdir()]
    return sorted((int(match[1]), path) for match, path in named if match)


def _prune(directory: Path, newest: int, keep: int) -> None:
    """Removes sound checkpoints below the `keep` newest. The one just written counts first. Newer ones exist only
    because they were rejected at a resume, and damaged ones may still be of use to the user; neither counts and neither
    is touched, so they never push a sound one out."""
    kept = 1
    for step, path in reversed(_steps(directory)):
        if step >= newest or not _looks_sound(path):
            continue
        if kept < keep:
            kept += 1
        else:
            remove_directory(path)


def _looks_sound(path: Path) -> bool:
    try:
        size: object = _read_content(path)["tensors"].get("bytes")
        return (path / TENSORS_FILE).stat().st_size == size
    except (CheckpointError, OSError):
        return False


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
    assert tensor.device.type == "cpu", "files are written from the CPU's memory"
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
