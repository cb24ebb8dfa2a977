"""Prepares data: the rows of all sources, chunk by chunk, become samples in flat arrays and an account of them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from weft.data.dataset import Dataset, DataSummary, measures
from weft.data.prepared.arrays import SampleColumns
from weft.data.prepared.convert import ConvertedChunk, Converter, is_before
from weft.data.prepared.sieve import Account
from weft.data.rows.row import Row
from weft.data.rows.sources import Source
from weft.objectives.objective import Objective
from weft.objectives.registry import OBJECTIVES, SUPERVISED

ROWS_PER_CHUNK = 1024
SPLIT_NOTE = (
    "{:,} chats are {:,} samples, because their chat template shows earlier answers otherwise once later turns follow "
    "(mask_history trains the last answer only)"
)


class _OtherObjective(Exception):  # noqa: N818
    """Rows ask for another objective than those before them were converted for."""


def prepare(sources: Sequence[Source], converter: Converter, folder: Path | None = None) -> Dataset:
    """The samples of all sources, in `folder` or in memory; any problem is a DataError naming the row."""
    objective = converter.settings.objective
    while True:
        try:
            with contextlib.closing(SampleColumns(folder)) as columns:
                preparing = _Preparing(converter, objective, columns)
                for source in sources:
                    preparing.take(source)
                return preparing.dataset([source.name for source in sources])
        except _OtherObjective as found:
            # Where a job names no objective, one row that asks for another is enough: all begins anew with that.
            objective = str(found)


class _Preparing:
    """What the rows so far have become."""

    def __init__(self, converter: Converter, objective: str, columns: SampleColumns) -> None:
        self._converter = converter
        self._objective = objective
        self._claimed: Objective = SUPERVISED
        self._columns = columns
        self._account = Account()
        self._formats: list[str] = []

    def take(self, source: Source) -> None:
        """Converts all rows of a source."""
        first_format = None
        for rows in _chunks(source.rows()):
            chunk = self._converter.convert(rows, objective=self._objective, first_format=first_format)
            if self._objective not in ("auto", chunk.objective):
                raise _OtherObjective(chunk.objective)
            self._add(chunk)
            first_format = chunk.data_format
        assert first_format is not None, "a source has rows"
        self._formats.append(first_format)

    def _add(self, chunk: ConvertedChunk) -> None:
        self._objective = chunk.objective
        claimed = OBJECTIVES[chunk.claimed]
        if is_before(claimed, self._claimed):
            self._claimed = claimed
        self._columns.append(chunk.samples, chunk.rows + self._account.num_rows)
        self._account.add(chunk.account)

    def dataset(self, sources: Sequence[str]) -> Dataset:
        """The samples and their account; no samples at all are a DataError."""
        samples, rows = self._columns.finish()
        account, settings = self._account, self._converter.settings
        if not len(samples):
            raise account.nothing_left(settings.max_length, ", ".join(sources))
        chosen = OBJECTIVES[self._objective]
        summary = DataSummary(
            sources=tuple(sources),
            format=", ".join(dict.fromkeys(self._formats)),
            num_rows=account.num_rows,
            num_truncated=account.num_truncated,
            num_dropped_long=account.num_dropped_long,
            num_dropped_unsupervised=account.num_untrained + account.num_cut_off,
            length_limit=settings.max_length,
            notes=tuple(_notes(chosen, self._claimed, account)),
            **measures(samples),
        )
        return Dataset(samples, summary, chosen, rows if account.num_split else None)


def _chunks(rows: Iterator[Row]) -> Iterator[list[Row]]:
    while chunk := list(itertools.islice(rows, ROWS_PER_CHUNK)):
        yield chunk


def _notes(chosen: Objective, claimed: Objective, account: Account) -> Iterator[str]:
    """What else a user should know of the data."""
    if chosen is not claimed:
        yield f"objective {chosen.name}, though the columns are those of {claimed.name}"
    elif chosen is not SUPERVISED:
        yield f"objective {chosen.name}, by the columns"
    if account.num_without_tools:
        yield f"the chat template has no place for tools: {account.num_without_tools:,} rows go without theirs"
    if account.num_split:
        num_samples = account.num_groups - account.num_rows + account.num_split
        yield SPLIT_NOTE.format(account.num_split, num_samples)
