"""SHA-256 of data files, cached while the files are unchanged: hashing a large file takes longer than all else.

A digest is stored with all file attributes, and only for a file that was last changed a while ago: a change within the
same tick of the file system's clock would not be visible. A record that is unreadable or invalid is written again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from weft.data.chat_template import FUNCTION, ChatTemplate, Tokenizer
from weft.data.prepared.arrays import sealed, unsealed
from weft.data.prepared.convert import DataSettings
from weft.data.prepared.workers import line_chunks
from weft.data.sources import Source

RECORD = "digests.json"
REMEMBERED_BYTES = 2**20
"""Smaller files are hashed without the cache."""
STABLE_S = 2.0
"""Minimum age of a file's last change for its digest to be cached."""
MAX_REMEMBERED = 10_000


class FileDigests:
    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._folder, self._clock = folder, clock
        self._known: dict[str, list[str | int]] | None = None
        self._new: dict[str, list[str | int]] = {}

    def of(self, path: Path) -> str:
        before = os.stat(path)
        if before.st_size < REMEMBERED_BYTES:
            return file_digest(path)
        if self._known is None:
            self._known = unsealed(self._folder / RECORD, "files") or {}
        name, stamp = os.path.realpath(path), _stamp(before)
        known = self._known.get(name)
        if known is not None and known[:-1] == stamp:
            return str(known[-1])
        result = file_digest(path)
        is_stable = self._clock() - max(before.st_mtime, before.st_ctime) > STABLE_S
        if is_stable and _stamp(os.stat(path)) == stamp:
            self._known[name] = self._new[name] = [*stamp, result]
        return result

    def save(self) -> None:
        if not self._new:
            return
        record = unsealed(self._folder / RECORD, "files") or {}
        for name in self._new:
            record.pop(name, None)
        kept = dict(list({**record, **self._new}.items())[-MAX_REMEMBERED:])
        with contextlib.suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _replace(self._folder / RECORD, sealed("files", kept))
        self._new.clear()


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _replace(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(name, path)
    except OSError:
        os.unlink(name)
        raise


def _stamp(status: os.stat_result) -> list[str | int]:
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


VERSION = 4
"""Version of the code that prepares data: raised when the same rows become other samples or other files."""
LIBRARIES = ("transformers", "tokenizers", "jinja2", "numpy")
_IDENTITIES: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def prepared_key(
    sources: Sequence[Source], tokenizer: Tokenizer, settings: DataSettings, digests: FileDigests
) -> str | None:
    """The key of prepared data; None if an input has no stable identity."""
    clock = None
    if FUNCTION in ChatTemplate(tokenizer, settings.chat_template).text:
        if settings.clock is None:
            return None
        clock = settings.clock.isoformat()
    known = tokenizer_identity(tokenizer)
    if known is None or any(source.is_on_hub for source in sources):
        return None
    files = [_identity(source, digests) for source in sources]
    chosen = {**vars(settings), "data_columns": list(settings.data_columns.items()), "clock": clock}
    parts = [VERSION, _versions(), known, files, chosen]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@cache
def _versions() -> list[str]:
    # Reading them parses each package's whole description.
    return [version(name) for name in LIBRARIES]


def _identity(source: Source, digests: FileDigests) -> list[Any]:
    """Identity of the rows of files; of large ones of which only the front is needed, only that is read."""
    if source.max_rows is None or not source.is_lines:
        return [source.max_rows, [(file.kind, digests.of(file.path)) for file in source.files]]
    digest = hashlib.sha256()
    for chunk in line_chunks(source):
        digest.update(f"{chunk.first_number} {len(chunk.lines)} ".encode() + b"".join(chunk.lines))
    return [source.max_rows, digest.hexdigest()]


def tokenizer_identity(tokenizer: Tokenizer) -> str | None:
    """SHA-256 of everything that a tokenizer's results depend on; None for one that cannot serialise itself."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not tokenizer.is_fast or backend is None:
        return None
    # The special tokens and the templates can be set at any time; the rest is only serialised once.
    changeable = [
        type(tokenizer).__qualname__,
        {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        dict(tokenizer.chat_template) if isinstance(tokenizer.chat_template, Mapping) else tokenizer.chat_template,
        getattr(tokenizer, "split_special_tokens", False),
        [tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)],
    ]
    if tokenizer not in _IDENTITIES:
        _IDENTITIES[tokenizer] = hashlib.sha256(backend.to_str().encode()).hexdigest()
    return hashlib.sha256(json.dumps([_IDENTITIES[tokenizer], changeable], sort_keys=True).encode()).hexdigest()
