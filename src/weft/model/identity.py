"""Digests of a base model's files, by which a resumed job notices another model of the same name.

weights         of each file its size; of safetensors files also name, shape and offsets of every tensor and 256 bytes
                at its beginning, middle and end; of other files at most 1,024 blocks of 4 KiB. A change elsewhere in a
                tensor is not noticed, and the same weights cut into other files are another digest.
config          config.json, as values, without names, dtypes (the run's own setting) and the version of transformers
tokenizer       the tokenizer's files, JSON as values, without the chat template
chat_template   the template that conversations are rendered with

Values instead of bytes, because saving a file again may change its layout. Reading takes milliseconds per GB, so
nothing is cached. A file that is not on this machine has no digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from weft.data.chat_template import Tokenizer, template_digest
from weft.model.source import INDEX, Source

SAMPLE_BYTES = 256
BLOCK_BYTES = 4096
MAX_BLOCKS = 1024
CONFIG = "config.json"
TOKENIZER_FILES = (
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
UNCOUNTED = ("_name_or_path", "chat_template", "dtype", "name_or_path", "torch_dtype", "transformers_version")


def model_digests(source: Source, tokenizer: Tokenizer) -> dict[str, str]:
    found = {"chat_template": template_digest(tokenizer)}
    weights = [Path(source.path) / source.gguf_file] if source.gguf_file else _weight_files(source.path)
    config = [] if source.gguf_file else _present(source.path, [CONFIG])
    for name, digest in {
        "weights": _digest(weights, _weights_digest),
        "config": _digest(config, _values_digest),
        "tokenizer": _digest(_present(source.path, TOKENIZER_FILES), _values_digest),
    }.items():
        if digest is not None:
            found[name] = digest
    return found


def _digest(files: Iterable[Path], digest_of: Any) -> str | None:
    parts = [(file.name, digest_of(file)) for file in files]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest() if parts else None


def _present(path: str, names: Iterable[str]) -> list[Path]:
    if Path(path).is_dir():
        files: Iterable[Path] = (Path(path) / name for name in names)
        return [file for file in files if file.is_file()]
    from huggingface_hub import try_to_load_from_cache

    cached = (try_to_load_from_cache(path, name) for name in names)
    return [Path(file) for file in cached if isinstance(file, str)]


def _weight_files(path: str) -> list[Path]:
    index = _present(path, [INDEX])
    if not index:
        return _present(path, ["model.safetensors"]) or sorted(Path(path).glob("*.safetensors"))
    return _present(path, sorted(set(json.loads(index[0].read_text("utf-8"))["weight_map"].values())))


def _values_digest(file: Path) -> str:
    data = file.read_bytes()
    if file.suffix == ".json":
        values: Any = json.loads(data)
        if isinstance(values, Mapping):
            values = {name: value for name, value in values.items() if name not in UNCOUNTED}
        data = json.dumps(values, sort_keys=True).encode()
    return hashlib.sha256(data).hexdigest()


def _weights_digest(file: Path) -> str:
    size = file.stat().st_size
    digest = hashlib.sha256(f"{size} ".encode())
    with file.open("rb") as opened:
        if file.suffix == ".safetensors":
            length = int.from_bytes(opened.read(8), "little")
            header = opened.read(length)
            tensors = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
            digest.update(json.dumps(tensors, sort_keys=True).encode())
            regions = []
            for _, entry in sorted(tensors.items()):
                begin, end = (8 + length + offset for offset in entry["data_offsets"])
                last = max(begin, end - SAMPLE_BYTES)
                regions += [(start, min(SAMPLE_BYTES, end - start)) for start in (begin, (begin + last) // 2, last)]
        else:
            step = max(BLOCK_BYTES, -(-max(0, size - BLOCK_BYTES) // (MAX_BLOCKS - 1)))
            regions = [(start, BLOCK_BYTES) for start in range(0, size, step)]
            regions.append((max(0, size - BLOCK_BYTES), BLOCK_BYTES))
        for start, count in regions:
            opened.seek(start)
            digest.update(opened.read(count))
    return digest.hexdigest()
