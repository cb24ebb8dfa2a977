"""Adapters in a directory of the operator's, found and checked by their files without torch; every tenant may use them.

    DIR/french/adapter_config.json, adapter_model.safetensors      the model `french`, in PEFT's layout
    DIR/run/french/adapter/adapter_config.json, …                  the model `run/french`, in that of `weft train`

A version is a digest of the files' sizes and times, so a changed adapter is another one to workers. A broken adapter is
known with its error, which its clients get.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from weft.errors import AdapterFileError, ConfigError
from weft.serve.db.engine import DbRow
from weft.store import json_text
from weft.store.atomic import storage_errors

CONFIG_FILE, TENSORS_FILE = "adapter_config.json", "adapter_model.safetensors"
FILES = (CONFIG_FILE, TENSORS_FILE, "chat_template.jinja", "labels.json", "tokenizer.json")
"""The files that make a version."""
MAX_DEPTH = 4
CHECKPOINTS = "checkpoints"
"""The directory of a job's training checkpoints, which are no adapters."""
MOST_NAME_CHARS = 200
MOST_CONFIG_BYTES = 2**20


@dataclass(frozen=True)
class AdapterFolder:
    """An adapter as its files are now."""

    path: Path
    version: str
    num_bytes: int
    changed_at: int
    base: str | None = None
    """Name of its base model in its config."""
    error: str | None = None


def find_folders(root: Path) -> dict[str, Path]:
    """The folders of all adapters below a directory, by name: the path to them from there. StorageError if the
    directory cannot be read."""
    with storage_errors(root):
        next(root.iterdir(), None)
    return dict(_below(root, root, MAX_DEPTH))


def _below(root: Path, folder: Path, depth: int) -> Iterator[tuple[str, Path]]:
    try:
        entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError:
        return
    for entry in entries:
        if (own := adapter_folder(entry)) is not None:
            yield entry.relative_to(root).as_posix(), own
        elif depth > 1 and entry.name != CHECKPOINTS and entry.is_dir():
            yield from _below(root, entry, depth - 1)


def adapter_folder(path: Path) -> Path | None:
    """The folder with the files of an adapter: this one, or `adapter` in it."""
    return next((own for own in (path, path / "adapter") if (own / CONFIG_FILE).is_file()), None)


def look_at(name: str, path: Path) -> AdapterFolder:
    """An adapter by its files; what is wrong with them is its error."""
    stats = []
    for file in FILES:
        try:
            stat = (path / file).stat()
        except OSError:
            continue
        stats.append((file, stat.st_size, stat.st_mtime_ns, stat.st_ino))
    version = hashlib.sha256(repr(stats).encode()).hexdigest()[:16]
    size, changed_at = sum(each[1] for each in stats), max((each[2] for each in stats), default=0) // 10**9
    try:
        if ":" in name or len(name) > MOST_NAME_CHARS or not name.isprintable():
            raise AdapterFileError(f"its name has a ':' or more than {MOST_NAME_CHARS} characters; rename it.")
        base = _stated_base(path)
        _check_tensors(path / TENSORS_FILE)
    except AdapterFileError as error:
        return AdapterFolder(path, version, size, changed_at, error=str(error))
    except OSError as error:
        return AdapterFolder(path, version, size, changed_at, error=f"it cannot be read ({error.strerror}).")
    return AdapterFolder(path, version, size, changed_at, base)


def _stated_base(path: Path) -> str | None:
    with (path / CONFIG_FILE).open("rb") as file:
        try:
            config = json_text.parse(file.read(MOST_CONFIG_BYTES))
        except ValueError as error:
            raise AdapterFileError(f"{CONFIG_FILE} is not valid JSON: {error}.") from None
    if not isinstance(config, dict):
        raise AdapterFileError(f"{CONFIG_FILE} does not hold a JSON object.")
    base = config.get("base_model_name_or_path")
    return base if isinstance(base, str) and base else None


def _check_tensors(path: Path) -> None:
    """AdapterFileError if the file is missing or ends too early; workers check what is in it."""
    if not path.is_file():
        raise AdapterFileError(f"{TENSORS_FILE} is missing.")
    size = path.stat().st_size
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
        is_whole = 2 <= header <= size - 8
        text = file.read(header) if is_whole else b""
    try:
        entries = json_text.parse(text)
        end = max(entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__")
    except (AttributeError, LookupError, TypeError, ValueError):
        raise AdapterFileError(f"{TENSORS_FILE} is not a whole safetensors file.") from None
    if end != size - 8 - header:
        raise AdapterFileError(f"{TENSORS_FILE} is not a whole safetensors file.")


def common_base(root: Path) -> str:
    """The base model that the adapters below a directory name; ConfigError unless there is exactly one."""
    looks = {name: look_at(name, path) for name, path in find_folders(root).items()}
    named = {own.base: name for name, own in looks.items() if own.base is not None}
    if len(named) > 1:
        found = " and ".join(f"{name} on {base}" for base, name in list(named.items())[:3])
        message = f"the adapters were trained on different base models ({found}); choose with --base-model."
        raise ConfigError(message, where="--adapters")
    if not named:
        found = "no adapter there names a base model" if looks else "there is no adapter in it yet"
        raise ConfigError(f"{found}; give --base-model.", where="--adapters")
    return next(iter(named))


def backbone_of(stated: str | None, models: Mapping[str, str]) -> str | None:
    """The backbone of an adapter that names its base model: the only one, or the one of that name or path."""
    if len(models) == 1:
        return next(iter(models))
    return next((name for name, path in models.items() if stated in (name, path)), None)


def row_of(own: AdapterFolder, models: Mapping[str, str]) -> DbRow:
    """The columns of an adapter that follow from its files."""
    base, error = backbone_of(own.base, models), own.error
    if base is None and error is None:
        error = f"it was trained on {own.base or 'a model that it does not name'}; here are {', '.join(models)}."
    return {
        "path": str(own.path),
        "version": own.version,
        "base": base or "",
        "bytes": own.num_bytes,
        "created_at": own.changed_at,
        "error": error,
        "is_checked": False,
    }
