"""Prepares data: the rows of all sources, chunk by chunk, become samples in flat arrays, with counts."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from weft.data.chat.chat_template import Tokenizer
from weft.data.dataset import Dataset, DataSummary, measures
from weft.data.prepared.arrays import SampleColumns
from weft.data.prepared.cache import default_cache
from weft.data.prepared.convert import ConvertedChunk, Converter, DataSettings, is_before
from weft.data.prepared.digests import FileDigests
from weft.data.prepared.key import prepared_key
from weft.data.prepared.progress import PreparingBar
from weft.data.prepared.sieve import BlockCutter, RowCounts
from weft.data.prepared.workers import Workers
from weft.data.rows.chunks import Chunk, chunks_of
from weft.data.rows.columns import ColumnMap
from weft.data.rows.find import find_source
from weft.data.rows.sources import Source
from weft.data.samples import Samples
from weft.errors import DataError
from weft.objectives.objective import Objective
from weft.objectives.registry import OBJECTIVES, SUPERVISED
from weft.spec.job import SourceSpec

PARALLEL_BYTES = 16 * 2**20
"""A file of this size takes longer to convert than processes take to start."""
SHOWN_CLASSES = 12
"""Of more classes than these, only the first and the last are named."""
SPLIT_NOTE = (
    "{:,} chats are {:,} samples, because their chat template shows earlier answers otherwise once later turns follow "
    "(mask_history trains the last answer only)"
)


class _OtherObjective(Exception):  # noqa: N818
    """Rows need another objective than those before them were converted for."""


def prepare(sources: Sequence[Source], converter: Converter, folder: Path | None = None) -> Dataset:
    """The samples of all sources, in `folder` or in memory; any problem is a DataError naming the row."""
    objective = converter.settings.objective
    while True:
        try:
            with contextlib.ExitStack() as stack:
                columns = stack.enter_context(contextlib.closing(SampleColumns(folder)))
                bar = stack.enter_context(PreparingBar(sources))
                preparing = _Preparing(converter, objective, columns, bar)
                number = num_processes(sources, converter)
                if number > 1:
                    preparing.workers = stack.enter_context(contextlib.closing(Workers(converter, number)))
                for source in sources:
                    preparing.take(source)
                return preparing.dataset([source.name for source in sources])
        except _OtherObjective as other:
            # Where a job names no objective, one row that needs another is enough: all are then converted for that.
            objective = str(other)


class _Preparing:
    """The result of the rows so far."""

    def __init__(self, converter: Converter, objective: str, columns: SampleColumns, bar: PreparingBar) -> None:
        self._converter = converter
        self._objective = objective
        self._claimed: Objective = SUPERVISED
        self._columns, self._bar = columns, bar
        self._account = RowCounts()
        self._formats: list[str] = []
        self._num_kept = 0
        """Groups so far."""
        self._source_groups: list[int] = []
        settings = converter.settings
        self._cutter = BlockCutter(settings.max_length) if settings.group_texts else None
        self.workers: Workers | None = None
        """Convert all but the first rows of a source, if there are any."""

    def take(self, source: Source) -> None:
        """Converts all rows of a source: the first of them here, which decide its format, the rest in parallel."""
        before, first_format = self._account.num_rows, ""
        chunks = chunks_of(source)
        for chunk in chunks:
            result = self._converter.convert(chunk.rows(), objective=self._objective, first_format=None)
            self._add(result, chunk.num_bytes)
            if result.data_format:
                first_format = result.data_format
                break
        if self._account.num_rows == before:
            raise source.no_rows()
        self._formats.append(first_format)
        for result, num_bytes in self._rest(chunks, first_format):
            self._add(result, num_bytes)
        if self._cutter is not None:
            self._keep(self._cutter.finish())
        self._source_groups.append(self._num_kept - sum(self._source_groups))

    def _rest(self, chunks: Iterator[Chunk], first_format: str) -> Iterator[tuple[ConvertedChunk, int]]:
        """Results of the other chunks, in order, each with its size in bytes."""
        if self.workers is None:
            for chunk in chunks:
                rows = chunk.rows()
                yield (
                    self._converter.convert(rows, objective=self._objective, first_format=first_format),
                    chunk.num_bytes,
                )
            return
        sizes: deque[int] = deque()
        for result in self.workers.convert(_noting(chunks, sizes), self._objective, first_format):
            yield result, sizes.popleft()

    def _add(self, chunk: ConvertedChunk, num_bytes: int) -> None:
        if self._objective not in ("auto", chunk.objective):
            raise _OtherObjective(chunk.objective)
        self._objective = chunk.objective
        claimed = OBJECTIVES[chunk.claimed]
        if is_before(claimed, self._claimed):
            self._claimed = claimed
        if self._cutter is None:
            self._columns.append(chunk.samples, chunk.rows + self._account.num_rows)
            self._num_kept += len(chunk.rows)
        else:
            self._keep(self._cutter.add(chunk.samples.arrays.tokens))
        self._account.add(chunk.account)
        self._bar.advance(num_bytes, self._account.num_rows)

    def _keep(self, blocks: Samples) -> None:
        """Adds blocks that were cut from joined texts."""
        self._columns.append(blocks, np.arange(len(blocks)) + self._num_kept)
        self._num_kept += len(blocks)

    def dataset(self, sources: Sequence[str]) -> Dataset:
        """The samples and their summary; no samples at all are a DataError."""
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
            notes=(
                *_notes(chosen, self._claimed, account),
                *_classes(samples, settings.labels),
                *self._joined(),
            ),
            group_size=chosen.group_size,
            **measures(samples),
        )
        return Dataset(samples, summary, chosen, tuple(self._source_groups), rows if account.num_split else None)

    def _joined(self) -> Iterator[str]:
        if self._cutter is not None:
            length = self._converter.settings.max_length
            yield f"{self._account.num_rows:,} texts joined and cut in blocks of {length:,} tokens"


def num_processes(sources: Sequence[Source], converter: Converter) -> int:
    """Number of processes that convert the sources: one per core if they are large and their tokenizer can be
    pickled."""
    if sum(file.num_text_bytes for source in sources for file in source.files) < PARALLEL_BYTES:
        return 1
    # Code that came with a model is not there in other processes; and one that was started for a file keeps to itself.
    is_known = type(converter.tokenizer).__module__.split(".")[0] in ("transformers", "tokenizers")
    return len(os.sched_getaffinity(0)) if is_known and multiprocessing.parent_process() is None else 1


def _noting(chunks: Iterator[Chunk], sizes: deque[int]) -> Iterator[Chunk]:
    for chunk in chunks:
        sizes.append(chunk.num_bytes)
        yield chunk


def _notes(chosen: Objective, claimed: Objective, account: RowCounts) -> Iterator[str]:
    if chosen is not claimed:
        # Others read columns that mean another objective where none is named: pairs are also for orpo.
        is_passed_over = chosen is SUPERVISED and claimed is not SUPERVISED
        though = f", though the columns are those of {claimed.name}" if is_passed_over else ""
        yield f"objective {chosen.name}{though}"
    elif chosen is not SUPERVISED:
        yield f"objective {chosen.name}, by the columns"
    if account.num_without_tools:
        yield f"the chat template has no place for tools: {account.num_without_tools:,} rows go without theirs"
    if account.num_split > account.num_split_by_objective:
        num_samples = account.num_groups - account.num_rows + account.num_split
        yield SPLIT_NOTE.format(account.num_split, num_samples)


def _classes(samples: Samples, names: Sequence[str]) -> Iterator[str]:
    if not names or samples.arrays.labels is None:
        return
    labels = samples.arrays.labels
    num_met = len(np.unique(labels[~np.isnan(labels)]))
    met = "" if num_met == len(names) else f", of which the rows have {num_met:,}"
    shown = names if len(names) <= SHOWN_CLASSES else [*names[: SHOWN_CLASSES - 2], "…", names[-1]]
    yield f"{len(names):,} classes{met}: {', '.join(shown)}"


def prepared_data(
    wanted: Sequence[SourceSpec], tokenizer: Tokenizer, settings: DataSettings, base_dir: Path
) -> Dataset:
    """The samples of files or Hub data sets; any problem is a DataError naming the row."""
    converter = Converter(tokenizer, settings)
    converter.renderer.template  # noqa: B018  # a template that is none is refused before any file is opened
    has_header = not ColumnMap(settings.data_columns).by_number
    sources = [find_source(each.path, base_dir, has_header=has_header, max_rows=each.rows) for each in wanted]
    cache = default_cache()
    before = _stamps(sources)
    key = None if cache is None else _key(sources, tokenizer, settings, cache.digests)
    if cache is None or key is None:
        return prepare(sources, converter)
    result = cache.get(
        key, lambda folder: prepare(sources, converter, folder), is_current=lambda: _stamps(sources) == before
    )
    # It may have been prepared from files of other names.
    return replace(result, summary=replace(result.summary, sources=tuple(each.path for each in wanted)))


def _key(sources: Sequence[Source], tokenizer: Tokenizer, settings: DataSettings, digests: FileDigests) -> str | None:
    try:
        key = prepared_key(sources, tokenizer, settings, digests)
        digests.save()
        return key
    except OSError as error:
        name = next(file.name for source in sources for file in source.files if str(file.path) == str(error.filename))
        raise DataError(f"cannot be read ({error.strerror or error}).", where=name) from None


def _stamps(sources: Sequence[Source]) -> list[tuple[int, int, int]]:
    """File attributes that change with a file."""
    result = [os.stat(file.path) for source in sources for file in source.files]
    return [(each.st_ino, each.st_size, each.st_mtime_ns) for each in result]
