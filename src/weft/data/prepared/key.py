"""The name of prepared data in the cache: SHA-256 of all that its contents depend on.

That is the contents of the files, the serialised tokenizer, the chat template, every setting, the clock if the template
reads it, and the versions of the code that renders and tokenises. Names and locations are not included: the same file
under another name is the same data.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from weft.data.chat.chat_template import FUNCTION, ChatTemplate, Tokenizer
from weft.data.prepared.convert import DataSettings
from weft.data.prepared.digests import FileDigests
from weft.data.rows.chunks import line_chunks
from weft.data.rows.sources import Source

VERSION = 3
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
    parts = [VERSION, [version(name) for name in LIBRARIES], known, files, chosen]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


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
