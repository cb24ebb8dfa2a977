"""Merges an adapter into its base weights: W + scale · B A, written as an ordinary model directory."""

from __future__ import annotations

from pathlib import Path

import torch

from weft.backbone.load import load_plain_model, load_tokenizer
from weft.errors import AdapterFileError
from weft.spec import BackboneSpec
from weft.store.atomic import staged_directory
from weft.store.peft_files import read_adapter


@torch.no_grad()
def merge_adapter(adapter_dir: Path, spec: BackboneSpec, out: Path) -> int:
    """Writes the merged model and its tokenizer to `out`; returns the number of merged modules."""
    adapter, tensors, _ = read_adapter(adapter_dir)
    model = load_plain_model(spec)
    modules = dict(model.named_modules())
    for path, (a_RD, b_OR) in tensors.items():
        weight_OD = getattr(modules.get(path), "weight", None)
        if weight_OD is None or weight_OD.shape != (b_OR.shape[0], a_RD.shape[1]):
            raise AdapterFileError(f"{path} does not fit base_model {spec.base_model}.", where=str(adapter_dir))
        update_OD = adapter.scale_for(path) * (b_OR.float() @ a_RD.float())
        weight_OD.copy_((weight_OD.float() + update_OD.to(weight_OD.device)).to(weight_OD.dtype))
    with staged_directory(out) as folder:
        model.save_pretrained(folder)
        load_tokenizer(spec.base_model).save_pretrained(folder)
    return len(tensors)
