"""Adapters of the tiny backbone, written to directories."""

from __future__ import annotations

from pathlib import Path

import torch

from weft.spec import AdapterSpec
from weft.store.peft_files import write_adapter

SPEC = AdapterSpec(r=2, target_modules=("q_proj",))


def write_tiny(path: Path, seed: int = 1, *, base: str = "tiny") -> Path:
    """An adapter of some effect; another for every seed."""
    generator = torch.Generator().manual_seed(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"model.layers.{layer}.self_attn.q_proj": (
            torch.randn(2, 192, generator=generator),
            torch.randn(192, 2, generator=generator),
        )
        for layer in range(6)
    }
    write_adapter(path, SPEC, tensors, base_model=base, target_names=["q_proj"])
    return path
