"""Checks that the data tests share; nothing here needs the network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from weft.data.samples import Sample
from weft.data.sources import read_rows
from weft.errors import DataError


def assert_rows_or_data_error(path: Path, data: bytes) -> None:
    """The file reads as rows, or fails with a DataError that names it; any other error passes through."""
    path.write_bytes(data)
    try:
        found: str | list[Any] = [row.values for row in read_rows(path.name, path.parent)]
    except DataError as error:
        found = str(error)
    assert found if isinstance(found, list) else found.startswith(path.name)


def supervised_text(sample: Sample, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The text of each run of supervised tokens."""
    runs: list[list[int]] = []
    before = False
    for token, supervised in zip(sample.tokens.tolist(), sample.supervised.tolist(), strict=True):
        if supervised and not before:
            runs.append([])
        if supervised:
            runs[-1].append(token)
        before = supervised
    return [tokenizer.decode(run) for run in runs]
