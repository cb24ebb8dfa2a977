"""Merges an adapter into its base weights and writes them as an ordinary model directory."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from weft.adapters.linear_modules import linear_modules
from weft.adapters.method import Attachment
from weft.engine.inference.attach import StoredAdapter, check_fit
from weft.engine.inference.merge_rows import merge_rows
from weft.errors import AdapterFileError, StorageError
from weft.methods.registry import method_of
from weft.model.load import load_plain_model
from weft.model.source import load_tokenizer
from weft.spec import BackboneSpec
from weft.store.atomic import make_directories, staged_directory
from weft.store.row_files import ROWS


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
    model = load_plain_model(spec)
    tokenizer = load_tokenizer(spec.base_model)
    linears = linear_modules(model)
    check_fit(stored, {path: (m.out_features, m.in_features) for path, m in linears.items()}, spec.base_model)
    modules = {path: tensors for path, tensors in stored.tensors.items() if path not in ROWS}
    shapes = {path: (linears[path].out_features, linears[path].in_features) for path in modules}
    shared = method.shared(stored.spec, shapes, torch.device("cpu")).values()
    try:
        for path, tensors in modules.items():
            method.merge(stored.spec, path, (*tensors, *shared), linears[path])
    except AdapterFileError as error:
        raise error.at(str(stored.path)) from None
    tokenizer = merge_rows(stored, model, tokenizer)
    if stored.chat_template is not None:
        tokenizer.chat_template = stored.chat_template
    _write(model, tokenizer, out)
    return len(stored.tensors)


def _write(model: Any, tokenizer: Any, out: Path) -> None:
    """The model directory appears whole or not at all."""
    with contextlib.ExitStack() as undo:
        make_directories(out.parent, undo)
        with staged_directory(out) as folder:
            try:
                model.save_pretrained(folder)
            except SafetensorError as error:
                # Its writer reports a full disk in an error of its own.
                raise StorageError(f"cannot be written ({error}).", where=str(out)) from None
            tokenizer.save_pretrained(folder)
            _open_to_others(folder)
        undo.pop_all()


def _open_to_others(folder: Path) -> None:
    """Gives every file the permissions of any new file; safetensors lets only the owner read what it writes."""
    umask = os.umask(0)
    os.umask(umask)
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(0o666 & ~umask)
