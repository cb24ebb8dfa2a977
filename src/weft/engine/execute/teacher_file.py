"""Writes data with a teacher's predictions, for jobs on any backbone with the same tokens.

A row has `input_ids` and `labels`, as trainers know them, and for each supervised token the teacher's most likely ones:
`teacher_ids` with their log-probabilities in `teacher_logprobs`, in descending order.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from weft.data.dataset import Dataset
from weft.data.samples import Sample
from weft.model.backbone import Backbone
from weft.model.loss import top_tokens
from weft.model.packed import SlotSample, pack_samples
from weft.objectives.distillation import IDS, LOGPROBS
from weft.store.atomic import storage_errors

UNTRAINED = -100
DIGITS = 5
"""Decimal places of a log-probability."""


def write_teacher_file(
    path: Path, backbone: Backbone, slot: int | None, data: Dataset, top_k: int, capacity: int
) -> None:
    """Writes a .jsonl file with a row for each sample, completely or not at all."""
    temporary = path.with_name(f".{path.name}.part")
    with storage_errors(path):
        try:
            with temporary.open("w") as file:
                for row in teacher_rows(backbone, slot, data, top_k, capacity):
                    file.write(json.dumps(row, separators=(",", ":")) + "\n")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def teacher_rows(
    backbone: Backbone, slot: int | None, data: Dataset, top_k: int, capacity: int
) -> Iterator[dict[str, Any]]:
    """Rows of all samples, in order; computed a microbatch at a time."""
    path, leading = backbone.path_of(slot), backbone.leading_rows(slot)
    row_tile = path.row_tile(capacity)
    for samples in _microbatches(data, capacity, leading):
        packed_samples = [SlotSample(sample.led_by(leading), slot) for sample in samples]
        batch = pack_samples(packed_samples, row_tile, backbone.device)
        top = top_tokens(backbone.head, path.read(batch, row_tile), top_k)
        ids_of, logprobs_of = (values.cpu().split(list(batch.counts)) for values in top)
        for sample, ids, logprobs in zip(samples, ids_of, logprobs_of, strict=True):
            yield {
                "input_ids": sample.tokens.tolist(),
                "labels": np.where(sample.supervised, sample.tokens, UNTRAINED).tolist(),
                IDS: ids.tolist(),
                LOGPROBS: [[round(x, DIGITS) for x in row] for row in logprobs.tolist()],
            }


def _microbatches(data: Dataset, capacity: int, leading: int) -> Iterator[list[Sample]]:
    """As many samples at a time as fit, at least one."""
    held: list[Sample] = []
    tokens = 0
    for sample in data.samples:
        tokens += leading + sample.length
        if held and tokens > capacity:
            yield held
            held, tokens = [], leading + sample.length
        held.append(sample)
    yield held
