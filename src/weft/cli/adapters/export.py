"""`weft export` and `weft merge` make a trained adapter ready for a server, or make a whole model of it."""

from __future__ import annotations

import contextlib
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from weft.cli.options import path_argument, path_option
from weft.errors import AdapterFileError, ConfigError, StorageError, WeftError

if TYPE_CHECKING:
    from weft.engine.inference.attach import StoredAdapter

AdapterDir = Annotated[Path, path_argument("An adapter or a job's directory.", metavar="ADAPTER_DIR")]


def export(
    adapter_dir: AdapterDir,
    server: Annotated[str, typer.Option("--for", help="peft, vllm, sglang or tinker.", show_default=False)],
    out: Annotated[Path | None, path_option("Copy the adapter to this new directory.")] = None,
) -> None:
    """Check that a server takes an adapter, copy it, and show how to serve it."""
    from weft.engine.inference.attach import read_named
    from weft.store.peft_config import SERVERS, check_servable

    if server not in SERVERS:
        raise ConfigError(f"got {server!r}; accepted are {', '.join(SERVERS)}.", where="--for")
    _refuse_existing(out)
    stored = read_named(str(adapter_dir))
    if stored.head is not None and server != "peft":
        raise AdapterFileError("has a head for labels: it classifies and does not write.", where=str(stored.path))
    remarks = check_servable(stored.spec, stored.tensors, server)
    refusals = [str(remark) for remark in remarks if remark.refused]
    if refusals:
        raise AdapterFileError(" ".join(refusals), where=str(stored.path))
    whole = _whole_class(stored, server)
    if whole is not None and out is None:
        found = f"its base model is loaded as {whole}, whose decoder is under language_model, so no name would match"
        raise AdapterFileError(f"{found}; add --out DIR for a copy with those names.", where=str(stored.path))
    layout, family = _expert_layout(stored, server)
    if layout != "fused" and out is None:
        found = f"{server} reads the factors of experts in other files; add --out DIR for a copy in that form"
        raise AdapterFileError(f"{found}.", where=str(stored.path))
    if out is not None:
        _copy(stored, out, is_renamed=whole is not None, layout=layout, family=family)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    done = f"{stored.name} is ready for {server}"
    console.print(f"{done}: {out}" if out is not None else f"{done}: {stored.path}")
    for remark in remarks:
        console.print(f"note: {remark}")
    console.print(_directions(stored, (out or stored.path).resolve(), server, whole))


def merge(
    adapter_dir: AdapterDir,
    out: Annotated[Path, path_option("The new model directory.")],
    base_model: Annotated[
        str | None,
        typer.Option(help="The frozen model. Default: the one the adapter was trained on.", show_default=False),
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16; auto is float32.")] = "auto",
) -> None:
    """Add an adapter to its base weights and write an ordinary model directory."""
    _refuse_existing(out)
    from transformers.utils import logging

    from weft.engine.inference.attach import common_base, read_named
    from weft.engine.inference.merge import merge_adapter
    from weft.spec import BackboneSpec

    stored = read_named(str(adapter_dir))
    # On the CPU a model may be larger than the GPU's memory, and float32 sums are exact to the last bits.
    spec = BackboneSpec(base_model or common_base([stored]), dtype, "cpu")
    logging.disable_progress_bar()
    with Console(stderr=True).status(f"merging {stored.name} into {spec.base_model}"):
        count = merge_adapter(stored, spec, out)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(f"merged {count} modules of {stored.name} into {spec.base_model}: {out}")
    console.print(
        "It is a model of its own now: use it with transformers or any server, or try it with\n"
        f"  weft chat --base-model {shlex.quote(str(out))}"
    )


def _refuse_existing(out: Path | None) -> None:
    from weft.store.atomic import storage_errors

    if out is None:
        return
    with storage_errors(out):
        exists = out.exists() or out.is_symlink()
    if exists:
        raise StorageError("already exists; name a new directory.", where=f"--out {out}")


def _whole_class(stored: StoredAdapter, server: str) -> str | None:
    """The class as which a server loads the base, if Weft trained only the text model of it; else None."""
    from weft.store.peft_config import is_whole_model, read_config

    base = _base(stored)
    config = read_config(base)
    if config is None or not is_whole_model(config):
        return None
    if server == "peft":
        from transformers import AutoConfig

        from weft.model.resolve import is_auto_class

        if is_auto_class(AutoConfig.from_pretrained(base)):
            return None
    return str((config.get("architectures") or ["a vision-language model"])[0])


def _expert_layout(stored: StoredAdapter, server: str) -> tuple[str, str | None]:
    """The layout of experts' factors that a server reads, and the model type of the base."""
    from weft.store.expert_files import layout_for
    from weft.store.peft_config import read_config

    if stored.spec.experts == "none":
        return "fused", None
    config = read_config(_base(stored))
    if config is None and server != "peft":
        found = f"config.json of {stored.base_model} is not on this machine; it decides in which files"
        raise AdapterFileError(f"{found} {server} reads experts.", where=str(stored.path))
    family = None if config is None else str((config.get("text_config") or config).get("model_type"))
    return layout_for(stored.spec, server, family), family


def _copy(stored: StoredAdapter, out: Path, *, is_renamed: bool, layout: str, family: str | None) -> None:
    """`is_renamed`: with the names of a whole vision-language model; `layout`: that of experts' factors."""
    from weft.store.atomic import make_directories, staged_directory, write_unsynced
    from weft.store.peft_files import (
        CARD_FILE,
        CONFIG_FILE,
        LABELS_FILE,
        TEMPLATE_FILE,
        TENSORS_FILE,
        ServedForm,
        write_served,
    )
    from weft.store.row_files import TOKENIZER_FILES

    directory = stored.path
    with contextlib.ExitStack() as undo:
        make_directories(out.parent, undo)
        with staged_directory(out) as staged:
            is_changed = is_renamed or layout != "fused"
            if is_changed:
                form = ServedForm(is_renamed, layout, family)
                write_served(directory, staged, stored.spec, stored.tensors, form)
            own = () if is_changed else (CONFIG_FILE, TENSORS_FILE)
            for name in (*own, CARD_FILE, TEMPLATE_FILE, LABELS_FILE, *TOKENIZER_FILES):
                if (directory / name).is_file():
                    write_unsynced(staged / name, (directory / name).read_bytes())
        undo.pop_all()


def _directions(stored: StoredAdapter, directory: Path, server: str, whole: str | None) -> str:
    from weft.methods.registry import cost_ranks
    from weft.store.peft_config import VLLM_DEFAULT_RANK, VLLM_RANKS
    from weft.store.peft_files import TASKS, TEMPLATE_FILE
    from weft.store.row_files import resizing

    base, adapter = shlex.quote(_base(stored)), shlex.quote(f"{stored.name}={directory}")
    # A server has one template for all it serves.
    chats = f" --chat-template {shlex.quote(str(directory / TEMPLATE_FILE))}" if stored.chat_template else ""
    if server == "peft":
        kind, labels = "AutoModelForCausalLM" if whole is None else "AutoModelForImageTextToText", ""
        if stored.head is not None:
            kind, labels = TASKS[stored.head.task_type][1], f", num_labels={stored.head.num_labels}"
        tokens = "".join(f"  {line}\n" for line in resizing("model", repr(str(directory))))
        return (
            "Load it in Python:\n"
            "  from peft import PeftModel\n"
            f"  from transformers import {kind}{', AutoTokenizer' if stored.spec.new_tokens else ''}\n"
            f"  model = {kind}.from_pretrained({_base(stored)!r}{labels})\n"
            f"{tokens if stored.spec.new_tokens else ''}"
            f"  model = PeftModel.from_pretrained(model, {str(directory)!r})"
        )
    if server == "tinker":
        return (
            "Trainers that share the outer factors of experts read it; vLLM serves it with --enable-moe-shared-loras."
        )
    if server == "sglang":
        return (
            "Serve it:\n"
            f"  python -m sglang.launch_server --model-path {base} --enable-lora --lora-paths {adapter}{chats}\n"
            f"Requests name it as {stored.name} in lora_path."
        )
    top = cost_ranks(stored.spec).widest
    rank = next(rank for rank in VLLM_RANKS if rank >= max(top, VLLM_DEFAULT_RANK))
    load = json.dumps({"lora_name": stored.name, "lora_path": str(directory)})
    return (
        "Serve it:\n"
        f"  vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules {adapter}{chats}\n"
        "or load it into a server that runs with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1:\n"
        "  curl http://localhost:8000/v1/load_lora_adapter -H 'Content-Type: application/json' \\\n"
        f"    -d {shlex.quote(load)}\n"
        f"Requests name it as the model {stored.name}."
    )


def _base(stored: StoredAdapter) -> str:
    """The base model as other tools find it: names only Weft knows become their directories."""
    from weft.model.source import find_source

    if stored.base_model is None:
        return "BASE_MODEL"
    try:
        return find_source(stored.base_model).path
    except WeftError:
        # It may be on the machine that serves, even if it is not here.
        return stored.base_model
