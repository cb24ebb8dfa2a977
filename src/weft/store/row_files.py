"""An adapter's trained rows of the embedding and of the output head in PEFT's files.

    base_model.model.<path>.token_adapter.trainable_tokens_delta   (K, width): the rows of trainable_token_indices
    base_model.model.<path>.weight                                 (vocabulary, width): a module of modules_to_save

PEFT calls the first a delta, but they are the rows themselves.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from weft.adapters.method import ModuleTensors
from weft.adapters.parts import INPUT_ROWS, OUTPUT_ROWS
from weft.errors import AdapterFileError
from weft.methods.lora.config import EMBEDDINGS, OUTPUT_HEADS, is_output_head
from weft.spec import AdapterSpec
from weft.store import json_text
from weft.store.atomic import write_unsynced

ROWS = (INPUT_ROWS, OUTPUT_ROWS)
_SOME = ".token_adapter.trainable_tokens_delta"
_ALL = ".weight"


def names_in_file(spec: AdapterSpec, tensors: Mapping[str, ModuleTensors], paths: Mapping[str, str]) -> dict[str, str]:
    """PEFT's name of each kind of rows among an adapter's tensors, less its prefix. `paths` are those of the backbone's
    two modules."""
    own = spec.own_rows
    is_whole = {INPUT_ROWS: own.all_inputs, OUTPUT_ROWS: own.all_outputs}
    return {name: paths[name] + (_ALL if is_whole[name] else _SOME) for name in ROWS if name in tensors}


def rows_in_file(names: Collection[str]) -> dict[str, str]:
    result = {}
    for name in names:
        path, leaf = name.removesuffix(_SOME).removesuffix(_ALL), name.rpartition(".")[2]
        is_embedding = path.rpartition(".")[2] in (*EMBEDDINGS, *OUTPUT_HEADS)
        if name.endswith(_SOME) or (f".{leaf}" == _ALL and is_embedding):
            result[name] = OUTPUT_ROWS if is_output_head(path) else INPUT_ROWS
    return result


def check_rows(spec: AdapterSpec, rows: Mapping[str, torch.Tensor], where: str) -> None:
    """AdapterFileError if rows are not those of the spec; the number of rows of a whole module is checked by the
    backbone."""
    own = spec.own_rows
    requested = {INPUT_ROWS: (own.inputs, own.all_inputs), OUTPUT_ROWS: (own.outputs, own.all_outputs)}
    for name, (ids, is_whole) in requested.items():
        # A head that is tied to the embedding has its rows there.
        is_tied = name == OUTPUT_ROWS and ids is not None and ids == own.inputs
        if name not in rows and (is_whole or (ids is not None and not is_tied)):
            raise AdapterFileError(f"{_words(name)} are missing, which the config names.", where=where)
    for name, tensor in rows.items():
        ids, is_whole = requested[name]
        if ids is None and not is_whole:
            raise AdapterFileError(f"holds {_words(name)}, which the config does not name.", where=where)
        if tensor.dim() != 2 or not tensor.numel() or (ids is not None and len(tensor) != len(ids)):
            expected = "(vocabulary, width)" if ids is None else f"({len(ids)}, width)"
            raise AdapterFileError(f"{_words(name)} are {tuple(tensor.shape)}; expected {expected}.", where=where)
        if not tensor.isfinite().all():
            raise AdapterFileError(f"{_words(name)} hold a NaN or an infinity.", where=where)


def _words(name: str) -> str:
    return f"rows of the {'output head' if name == OUTPUT_ROWS else 'input embedding'}"


TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_FILES = (TOKENIZER_FILE, "tokenizer_config.json", "special_tokens_map.json")
"""Files that transformers may write for a tokenizer; a chat template is another file."""
MOST_BYTES = 1 << 26
"""Maximum size of tokenizer.json. That of Llama 3 has 17 MB."""


def write_tokenizer(directory: Path, tokenizer: Any) -> None:
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
