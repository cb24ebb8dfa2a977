"""`weft eval --logits`: what an adapter, or the bare model, says of data, in a file that jobs learn from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from weft.errors import ConfigError
from weft.objectives.teacher_columns import MOST_TOKENS

if TYPE_CHECKING:
    from weft.data.dataset import Dataset
    from weft.engine.inference.attach import Attached
    from weft.model.backbone import Backbone


def check_logits(path: Path, adapters: list[str] | None, top_k: int) -> None:
    """ConfigError if a file cannot be written, or if it is not clear who is to speak."""
    if path.suffix != ".jsonl":
        raise ConfigError(f"got {path.name}; expected the name of a .jsonl file.", where="--logits")
    if path.exists():
        raise ConfigError(f"{path} is there already; name another file.", where="--logits")
    if not path.parent.is_dir():
        raise ConfigError(f"there is no directory {path.parent}.", where="--logits")
    if adapters is not None and len(adapters) > 1:
        raise ConfigError(f"got {len(adapters)} adapters; it is one that speaks, or the bare model.", where="--logits")
    if not 1 <= top_k <= MOST_TOKENS:
        raise ConfigError(f"must be from 1 to {MOST_TOKENS:,}, got {top_k}.", where="--top-k")


class Speaker(NamedTuple):
    """Who speaks of what."""

    backbone: Backbone
    slot: int | None
    data: Dataset


def speaker(loaded: Attached, datasets: dict[str, Dataset], top_k: int) -> Speaker:
    """The only adapter, or the bare model without one, and the data as it reads them; ConfigError if it cannot."""
    name = list(loaded.slots)[-1]
    slot, data = loaded.slots[name], datasets[name]
    if data.likelihood_objective is not None or data.head is not None:
        found = f"the data is measured by objective {data.objective.name}"
        raise ConfigError(f"{found}; a teacher speaks of single answers and texts.", where="--logits")
    if loaded.backbone.has_own_head(slot):
        found = f"{name} has rows of the output head of its own, and a student has the backbone's"
        raise ConfigError(f"{found}; name another.", where="--logits")
    if top_k > loaded.backbone.vocabulary:
        raise ConfigError(f"got {top_k}; the model has {loaded.backbone.vocabulary:,} tokens.", where="--top-k")
    return Speaker(loaded.backbone, slot, data)


def write_logits(path: Path, speaks: Speaker, top_k: int, capacity: int) -> None:
    """Writes what is said of the data."""
    from weft.engine.execute.teacher_file import write_teacher_file

    write_teacher_file(path, *speaks, top_k, capacity)
