"""Adapters in a directory or at a URL of the operator's, which every tenant may use; found and checked without torch.

    DIR/french/adapter_config.json, adapter_model.safetensors      the model `french`, in PEFT's layout
    DIR/run/french/adapter/adapter_config.json, …                  the model `run/french`, in that of `weft train`

A version is a digest of the files' sizes and times, or of a store's tags, so a changed adapter is another one to
workers. A broken adapter is known with its error, which its clients get.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from weft.errors import AdapterFileError, ConfigError
from weft.serve.db.engine import DbRow
from weft.store import json_text
from weft.store.atomic import storage_errors
from weft.store.remote_files import FileStat, RemoteDirectory

CONFIG_FILE, TENSORS_FILE = "adapter_config.json", "adapter_model.safetensors"
FILES = (CONFIG_FILE, TENSORS_FILE, "chat_template.jinja", "labels.json", "tokenizer.json")
"""The files that make a version."""
MAX_DEPTH = 4
CHECKPOINTS = "checkpoints"
"""The directory of a job's training checkpoints, which are no adapters."""
MOST_NAME_CHARS = 200
MOST_CONFIG_BYTES = 2**20
WHERE = "--adapters"


@dataclass(frozen=True)
class AdapterFolder:
    """An adapter as its files are now."""

    path: str
    """A directory, or a URL."""
    version: str
    num_bytes: int
    changed_at: int
    base: str | None = None
    """Name of its base model in its config."""
    error: str | None = None


Seen = Mapping[tuple[str, str], AdapterFolder]
"""By name and path."""
EMPTY: Seen = MappingProxyType({})


@dataclass(frozen=True)
class _Files:
    """The files of an adapter."""

    path: str
    stats: Mapping[str, FileStat]
    read: Callable[[str, int, int], bytes]
    """Reads a part of one."""

    @property
    def version(self) -> str:
        return hashlib.sha256(repr([(name, *stat) for name, stat in self.stats.items()]).encode()).hexdigest()[:16]


def is_url(path: str) -> bool:
    return "://" in path


def adapters_below(root: str, seen: Seen = EMPTY) -> dict[str, AdapterFolder]:
    """All adapters below a directory or URL, by name: the path to them from there. StorageError if it cannot be read.
    `seen`: what was found before; files of the same version are not read again."""
    if is_url(root):
        remote = RemoteDirectory(root, WHERE)
        files = remote.files()
        found = {name: _remote_files(remote, folder, files) for name, folder in _folders_among(files).items()}
    else:
        with storage_errors(Path(root)):
            next(Path(root).iterdir(), None)
        found = {name: _local_files(path) for name, path in _below(Path(root), Path(root), MAX_DEPTH)}
    return {name: _look(name, own, seen) for name, own in found.items()}


def adapter_at(name: str, path: str, seen: Seen = EMPTY) -> AdapterFolder | None:
    """The adapter in a directory or at a URL, or in `adapter` there; None if there is none."""
    if not is_url(path):
        folder = _adapter_folder(Path(path))
        return None if folder is None else _look(name, _local_files(folder), seen)
    remote = RemoteDirectory(path, WHERE)
    files = remote.files()
    own = next((folder for folder in ("", "adapter/") if folder + CONFIG_FILE in files), None)
    return None if own is None else _look(name, _remote_files(remote, own, files), seen)


def fetch_adapter(url: str, folder: Path) -> None:
    """Copies the files of an adapter at a URL."""
    remote = RemoteDirectory(url, WHERE)
    for name in remote.files():
        if name in FILES:
            remote.download(name, folder / name)


def _below(root: Path, folder: Path, depth: int) -> Iterator[tuple[str, Path]]:
    try:
        entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError:
        return
    for entry in entries:
        if (own := _adapter_folder(entry)) is not None:
            yield entry.relative_to(root).as_posix(), own
        elif depth > 1 and entry.name != CHECKPOINTS and entry.is_dir():
            yield from _below(root, entry, depth - 1)


def _adapter_folder(path: Path) -> Path | None:
    return next((own for own in (path, path / "adapter") if (own / CONFIG_FILE).is_file()), None)


def _folders_among(files: Iterable[str]) -> dict[str, str]:
    """The folders of adapters among the files at a URL, by name, as `_below` finds them in a directory."""
    found = {}
    for file in files:
        folder, _, last = file.rpartition("/")
        if last == CONFIG_FILE and folder:
            # One that has a config beside `adapter` comes later than that.
            found[folder.removesuffix("/adapter")] = f"{folder}/"
    names = {name: name.split("/") for name in found}
    return {
        name: found[name]
        for name, parts in names.items()
        if len(parts) <= MAX_DEPTH
        and CHECKPOINTS not in parts[:-1]
        and not any(part.startswith(".") for part in parts)
        and not any("/".join(parts[:depth]) in found for depth in range(1, len(parts)))
    }


def _local_files(path: Path) -> _Files:
    stats = {}
    for file in FILES:
        try:
            stat = (path / file).stat()
        except OSError:
            continue
        stats[file] = FileStat(stat.st_size, stat.st_mtime_ns // 10**9, f"{stat.st_mtime_ns} {stat.st_ino}")

    def read(name: str, start: int, end: int) -> bytes:
        with (path / name).open("rb") as file:
            file.seek(start)
            return file.read(end - start)

    return _Files(str(path), stats, read)


def _remote_files(remote: RemoteDirectory, folder: str, files: Mapping[str, FileStat]) -> _Files:
    """`folder` ends with a slash, or is empty."""

    def read(name: str, start: int, end: int) -> bytes:
        return remote.read(folder + name, start, end) or b""

    own = {name: files[folder + name] for name in FILES if folder + name in files}
    return _Files(f"{remote.url}/{folder}".rstrip("/"), own, read)


def _look(name: str, files: _Files, seen: Seen) -> AdapterFolder:
    """An adapter by its files; what is wrong with them is its error."""
    version, before = files.version, seen.get((name, files.path))
    if before is not None and before.version == version:
        return before
    found = AdapterFolder(
        files.path,
        version,
        sum(stat.size for stat in files.stats.values()),
        max((stat.changed_at for stat in files.stats.values()), default=0),
    )
    try:
        if ":" in name or len(name) > MOST_NAME_CHARS or not name.isprintable():
            raise AdapterFileError(f"its name has a ':' or more than {MOST_NAME_CHARS} characters; rename it.")
        base = _stated_base(files)
        _check_tensors(files)
    except AdapterFileError as error:
        return replace(found, error=str(error))
    except OSError as error:
        return replace(found, error=f"it cannot be read ({error.strerror}).")
    return replace(found, base=base)


def _stated_base(files: _Files) -> str | None:
    try:
        config = json_text.parse(files.read(CONFIG_FILE, 0, MOST_CONFIG_BYTES))
    except ValueError as error:
        raise AdapterFileError(f"{CONFIG_FILE} is not valid JSON: {error}.") from None
    if not isinstance(config, dict):
        raise AdapterFileError(f"{CONFIG_FILE} does not hold a JSON object.")
    base = config.get("base_model_name_or_path")
    return base if isinstance(base, str) and base else None


def _check_tensors(files: _Files) -> None:
    """AdapterFileError if the file is missing or ends too early; workers check what is in it."""
    if TENSORS_FILE not in files.stats:
        raise AdapterFileError(f"{TENSORS_FILE} is missing.")
    size = files.stats[TENSORS_FILE].size
    header = int.from_bytes(files.read(TENSORS_FILE, 0, 8), "little")
    is_whole = 2 <= header <= size - 8
    text = files.read(TENSORS_FILE, 8, 8 + header) if is_whole else b""
    try:
        entries = json_text.parse(text)
        end = max(entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__")
    except (AttributeError, LookupError, TypeError, ValueError):
        raise AdapterFileError(f"{TENSORS_FILE} is not a whole safetensors file.") from None
    if end != size - 8 - header:
        raise AdapterFileError(f"{TENSORS_FILE} is not a whole safetensors file.")


def common_base(root: str) -> str:
    """The base model that the adapters below a directory or URL name; ConfigError unless there is exactly one."""
    looks = adapters_below(root)
    named = {own.base: name for name, own in looks.items() if own.base is not None}
    if len(named) > 1:
        found = " and ".join(f"{name} on {base}" for base, name in list(named.items())[:3])
        message = f"the adapters were trained on different base models ({found}); choose with --base-model."
        raise ConfigError(message, where=WHERE)
    if not named:
        found = "no adapter there names a base model" if looks else "there is no adapter in it yet"
        raise ConfigError(f"{found}; give --base-model.", where=WHERE)
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
        "path": own.path,
        "version": own.version,
        "base": base or "",
        "bytes": own.num_bytes,
        "created_at": own.changed_at,
        "error": error,
        "is_checked": False,
    }
