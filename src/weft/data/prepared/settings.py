"""Everything besides its sources and its tokenizer that decides what becomes of a job's data."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """How rows are read, rendered, masked and cut; the fields are those of a job."""

    objective: str
    data_format: str
    data_columns: Mapping[str, str | int]
    max_length: int
    long_samples: str
    train_on_inputs: bool
    mask_history: bool
    chat_template: str | None
    """Used instead of the tokenizer's."""
    group_texts: bool = False
    """Whether texts are joined and cut in blocks of max_length."""
    labels: tuple[str, ...] = ()
    """The names of classes, for objectives that have any."""
    clock: datetime.datetime | None
    """What time it is for chat templates that ask; None: what time it is."""
