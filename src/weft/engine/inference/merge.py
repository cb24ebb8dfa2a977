"""Merges an adapter, with its own rows of tokens, into its base weights and writes them as a model directory.

Of a vision-language model the text model's weights change; all else is written as it is in its files.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from weft.adapters.method import Attachment, LinearShape
from weft.adapters.parts import OUTPUT_ROWS
from weft.adapters.sites import linear_modules
from weft.data.tokenise import with_new_tokens
from weft.engine.inference.attach import StoredAdapter, check_fit
from weft.errors import AdapterFileError, ConfigError, StorageError
from weft.methods.lora.expert_weights import merge_factors
from weft.methods.registry import method_of
from weft.model.load import load_plain_model
from weft.model.packing.experts import expert_products_of
from weft.model.resolve import ResolvedModel, resolve
from weft.model.source import INDEX, load_tokenizer
from weft.model.stored_forms import ModelFiles, text_name
from weft.model.trained_rows import Embeddings
from weft.settings import DOWN, GATE_UP
from weft.spec import BackboneSpec
from weft.store.atomic import make_directories, staged_directory
from weft.store.row_files import ROWS

if TYPE_CHECKING:
    from weft.engine.inference.attach import StoredAdapter

_HEAD, _OLD_HEAD = "lm_head.weight", "language_model."
"""Name of the output head in the files of a whole model, and the prefix of its name in older files."""
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")
"""One expert's weight in files that have them one by one."""
_FORMAT = {"format": "pt"}
_PROCESSOR_FILES = (
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)


@torch.no_grad()
def merge_adapter(stored: StoredAdapter, spec: BackboneSpec, out: Path) -> int:
    """Writes the merged model and its tokenizer to `out`; returns the number of merged modules."""
    method = method_of(stored.spec)
    if stored.head is not None:
        raise AdapterFileError(
            "has a head for labels, for which a language model has no place; load it with PEFT.", where=str(stored.path)
        )
    if method.attachment is not Attachment.LINEAR:
        raise AdapterFileError(
            f"a {method.files.title} adapter changes no weights, so there are none to merge it into.",
            where=str(stored.path),
        )
    resolved = resolve(spec)
    model = load_plain_model(resolved)
    tokenizer = load_tokenizer(spec.base_model)
    linears = linear_modules(model)
    products = expert_products_of(model)
    all_shapes: dict[str, LinearShape] = {path: (m.out_features, m.in_features) for path, m in linears.items()}
    check_fit(stored, all_shapes | {path: site.shape for path, (site, _) in products.items()}, spec.base_model)
    modules = {path: tensors for path, tensors in stored.tensors.items() if path not in ROWS}
    shapes = {path: all_shapes[path] for path in modules if path in linears}
    shared = method.shared(stored.spec, shapes, torch.device("cpu")).values()
    try:
        for path, tensors in modules.items():
            if path in products:
                site, weight_EOD = products[path]
                merge_factors(weight_EOD[:, site.columns], tensors, stored.spec.scale_for(path))
            else:
                method.merge(stored.spec, path, (*tensors, *shared), linears[path])
    except AdapterFileError as error:
        raise error.at(str(stored.path)) from None
    tokenizer = merge_rows(stored, model, tokenizer)
    if stored.chat_template is not None:
        tokenizer.chat_template = stored.chat_template
    _write(model, tokenizer, out, resolved)
    return len(stored.tensors)


def _write(model: Any, tokenizer: Any, out: Path, resolved: ResolvedModel) -> None:
    with contextlib.ExitStack() as undo:
        make_directories(out.parent, undo)
        with staged_directory(out) as folder:
            try:
                if resolved.is_text_part:
                    _write_whole(model, resolved, folder)
                else:
                    model.save_pretrained(folder)
            except SafetensorError as error:
                # Its writer reports a full disk in an error of its own.
                raise StorageError(f"cannot be written ({error}).", where=str(out)) from None
            tokenizer.save_pretrained(folder)
            _open_to_others(folder)
        undo.pop_all()


def _write_whole(model: Any, resolved: ResolvedModel, folder: Path) -> None:
    """The files of a whole model, with the weights of its text model instead of those in them."""
    files, prefix, num_bytes = ModelFiles(resolved.source.path, fetches=True), "", 0
    products = expert_products_of(model)
    tied = model.all_tied_weights_keys if model.config.tie_word_embeddings else {}
    state = {name: weight for name, weight in model.state_dict().items() if name not in tied}
    written: set[str] = set()
    weight_map: dict[str, str] = {}
    *_, last = files.paths
    for path in files.paths:
        tensors = {}
        for name, tensor in files.tensors(resolved.dtype, path):
            own = text_name(name)
            expert = _EXPERT.fullmatch(own)
            if expert is not None and f"{expert[1]}.{expert[3]}" in products:
                site, weight_EOD = products[f"{expert[1]}.{expert[3]}"]
                tensors[name] = weight_EOD[int(expert[2]), site.columns]
                written.update(f"{expert[1]}.{each}" for each in (GATE_UP, DOWN))
            elif own not in tied:
                # Files may have a head that the configuration ties to the embedding.
                tensors[name] = state[own] if own in state else tensor[...]
                written.add(own)
            if name.startswith(_OLD_HEAD):
                prefix = _OLD_HEAD
        if path == last and _HEAD in state.keys() - written:
            tensors[f"{prefix}{_HEAD}"] = state[_HEAD]
            written.add(_HEAD)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / Path(path).name, _FORMAT)
        weight_map |= dict.fromkeys(tensors, Path(path).name)
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
    if missing := sorted(state.keys() - written):
        found = f"{missing[0]} is not in the files of {resolved.source.name} under this name"
        raise AdapterFileError(f"{found}, so it cannot be merged there.")
    if len(files.paths) > 1:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    _whole_config(model.config, resolved).save_pretrained(folder)
    for name in _PROCESSOR_FILES:
        if (file := files.other(name)) is not None:
            (folder / name).write_bytes(file.read_bytes())


def _whole_config(text: Any, resolved: ResolvedModel) -> Any:
    config = copy.deepcopy(resolved.whole_config)
    config.__dict__.pop("quantization_config", None)
    config._name_or_path, config.dtype = "", resolved.dtype
    # New tokens and trained heads change these.
    config.text_config.vocab_size = text.vocab_size
    if not text.tie_word_embeddings:
        config.tie_word_embeddings = config.text_config.tie_word_embeddings = False
    return config


def _open_to_others(folder: Path) -> None:
    """Gives every file the permissions of any new file; safetensors makes files readable by their owner only."""
    umask = os.umask(0)
    os.umask(umask)
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(0o666 & ~umask)


@torch.no_grad()
def merge_rows(stored: StoredAdapter, model: Any, tokenizer: Any) -> Any:
    """Replaces the rows, and returns the tokenizer with the adapter's new tokens, for which the model gets rows. If one
    of two tied modules is replaced as a whole, they are untied."""
    try:
        shapes = Embeddings(model, tokenizer).shapes(stored.spec)
    except ConfigError as error:
        raise AdapterFileError(error.message, where=str(stored.path)) from None
    extended = with_new_tokens(tokenizer, stored.spec.new_tokens)
    if stored.spec.new_tokens and len(extended) > len(model.get_input_embeddings().weight):
        model.resize_token_embeddings(len(extended), mean_resizing=False)
    if any(shape.ids is None for shape in shapes.values()):
        model.config.get_text_config().tie_word_embeddings = False
        head = model.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.clone(), requires_grad=False)
    for name in (name for name in ROWS if name in shapes):
        module = model.get_output_embeddings() if name == OUTPUT_ROWS else model.get_input_embeddings()
        (rows,), ids = stored.tensors[name], shapes[name].ids
        if [tuple(rows.shape)] != list(shapes[name].tensor_shapes):
            found = f"{name} are {tuple(rows.shape)}; the base model's are {shapes[name].tensor_shapes[0]}"
            raise AdapterFileError(f"{found}.", where=str(stored.path))
        module.weight[slice(None) if ids is None else torch.from_numpy(ids)] = rows.to(module.weight.dtype)
    return extended
