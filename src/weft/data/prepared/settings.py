"""All settings, besides sources and tokenizer, that a job's prepared data depends on."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Settings for reading, rendering, masking and cutting rows; the fields are those of a job."""

    objective: str
    data_format: str
    data_columns: Mapping[str, str | int]
    max_length: int
    long_samples: str
    train_on_inputs: bool
    mask_history: bool
    chat_template: str | None
    """Template used instead of the tokenizer's."""
    group_texts: bool = False
    """True if texts are joined and cut in blocks of max_length."""
    labels: tuple[str, ...] = ()
    """Names of classes, for objectives with classes."""
    clock: datetime.datetime | None
    """Time for chat templates that read it; None for the current time."""
