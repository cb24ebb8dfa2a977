"""Tiny random backbones cut into stages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tiny_models import random_model

from weft.backbone.backbone import Backbone
from weft.backbone.model_part import ModelPart, keep_part
from weft.execute.stages.stage_group import LocalStages
from weft.execute.stages.staged import StagedExecutor


def staged_executor(name: str, sizes: tuple[int, ...], **options: Any) -> StagedExecutor:
    """A tiny random model in this process, cut into stages of so many layers."""
    parts, first = [], 0
    tokenizer: Any = SimpleNamespace(eos_token_id=None)
    for size in sizes:
        part = ModelPart(first, first + size, sum(sizes))
        model = random_model(name, num_hidden_layers=part.num_layers, **options)
        keep_part(model, part)
        parts.append(Backbone(model, tokenizer, name, part))
        parts[-1].use_kernels("reference")
        first += size
    return StagedExecutor(LocalStages(parts), tokenizer)
