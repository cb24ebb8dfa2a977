"""The tokenizer of an adapter with new tokens, stored in its directory as transformers writes it.

Only the adapter's new tokens are read back, from tokenizer.json: the backbone has the rest.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from weft.errors import AdapterFileError
from weft.store import json_text
from weft.store.atomic import write_unsynced

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_FILES = (TOKENIZER_FILE, "tokenizer_config.json", "special_tokens_map.json")
"""Files that transformers may write for a tokenizer; a chat template is another file."""
MOST_BYTES = 1 << 26
"""Maximum size of tokenizer.json. That of Llama 3 has 17 MB."""


def write_tokenizer(directory: Path, tokenizer: Any) -> None:
    """Writes the tokenizer's files into a directory that is not at its final path yet."""
    with tempfile.TemporaryDirectory() as made:
        tokenizer.save_pretrained(made)
        for name in TOKENIZER_FILES:
            if (Path(made) / name).is_file():
                write_unsynced(directory / name, (Path(made) / name).read_bytes())


def resizing(model: str, directory: str) -> tuple[str, ...]:
    """Lines of Python that give a model rows for the tokens of an adapter, which PEFT then fills."""
    return (
        f"tokenizer = AutoTokenizer.from_pretrained({directory})",
        f"{model}.resize_token_embeddings(max(len(tokenizer), {model}.get_input_embeddings().num_embeddings))",
    )


def read_new_tokens(directory: Path, ids: Collection[int]) -> tuple[str, ...]:
    """The tokens with these ids that were added to the vocabulary of an adapter's tokenizer, by their ids."""
    path = directory / TOKENIZER_FILE
    if not path.is_file():
        return ()
    if path.stat().st_size > MOST_BYTES:
        raise AdapterFileError(f"has {path.stat().st_size} bytes; at most {MOST_BYTES} are read.", where=str(path))
    try:
        added = json_text.parse(path.read_bytes())["added_tokens"]
        result = {int(token["id"]): str(token["content"]) for token in added}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AdapterFileError("is no tokenizer that transformers wrote.", where=str(path)) from error
    return tuple(result[one] for one in sorted(result) if one in ids)
