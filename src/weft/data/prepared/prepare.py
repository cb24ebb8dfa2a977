"""Prepares data: the rows of all sources, chunk by chunk, become samples in flat arrays, with counts."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from weft.data.chat_template import Tokenizer
from weft.data.chats import THOUGHTS
from weft.data.dataset import Dataset, DataSummary, measures
from weft.data.json_rows import ColumnMap
from weft.data.prepared.arrays import SampleColumns
from weft.data.prepared.cache import default_cache
from weft.data.prepared.convert import BlockCutter, ConvertedChunk, Converter, DataSettings, RowCounts, is_before
from weft.data.prepared.key import FileDigests, prepared_key
from weft.data.prepared.workers import Chunk, Workers, chunks_of
from weft.data.samples import Samples
from weft.data.sources import Source, find_source
from weft.errors import DataError, counted
from weft.objectives.objective import Objective
from weft.objectives.registry import OBJECTIVES, SUPERVISED
from weft.processes import num_cores
from weft.spec.job import SourceSpec

PARALLEL_BYTES = 16 * 2**20
"""A file of this size takes longer to convert than processes take to start."""
SHOWN_CLASSES = 12
"""Of more classes than these, only the first and the last are named."""
SPLIT_NOTE = (
    "{} became {:,} samples, because their chat template shows earlier answers otherwise once later turns follow "
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
    def __init__(self, converter: Converter, objective: str, columns: SampleColumns, bar: PreparingBar) -> None:
        self._converter = converter
        self._objective = objective
        self._claimed: Objective = SUPERVISED
        self._columns, self._bar = columns, bar
        self._account = RowCounts()
        self._formats: list[str] = []
        self._num_kept = 0
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
                *self._opening(),
                *_classes(samples, settings.labels),
                *self._joined(),
            ),
            group_size=chosen.group_size,
            **measures(samples),
        )
        return Dataset(samples, summary, chosen, tuple(self._source_groups), rows if account.num_split else None)

    def _opening(self) -> Iterator[str]:
        renderer = self._converter.renderer
        is_rendered = set(self._formats) - {"text", "tokens", "passage", "words"}
        if is_rendered and renderer.has_template and not renderer.train_on_inputs:
            opening = renderer.template.prompt_opening
            if opening:
                yield f"answers are trained after {opening!r}, which the chat template opens every answer with"

    def _joined(self) -> Iterator[str]:
        if self._cutter is not None:
            length = self._converter.settings.max_length
            yield f"{counted(self._account.num_rows, 'text')} joined and cut in blocks of {length:,} tokens"


def num_processes(sources: Sequence[Source], converter: Converter) -> int:
    """Number of processes that convert the sources: one per core if they are large and the tokenizer pickles."""
    if sum(file.num_text_bytes for source in sources for file in source.files) < PARALLEL_BYTES:
        return 1
    # Code that came with a model is not there in other processes; and one that was started for a file keeps to itself.
    is_known = type(converter.tokenizer).__module__.split(".")[0] in ("transformers", "tokenizers")
    return num_cores() if is_known and multiprocessing.parent_process() is None else 1


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
        yield f"the chat template has no place for the tools of {counted(account.num_without_tools, 'row')}"
    if account.num_without_thoughts:
        names, number = ", ".join(THOUGHTS), counted(account.num_without_thoughts, "row")
        yield f"the thoughts of {number} ({names}) are left out: they need messages, and a template that reads them"
    if account.num_split > account.num_split_by_objective:
        num_samples = account.num_groups - account.num_rows + account.num_split
        yield SPLIT_NOTE.format(counted(account.num_split, "chat"), num_samples)


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
    result = [os.stat(file.path) for source in sources for file in source.files]
    return [(each.st_ino, each.st_size, each.st_mtime_ns) for each in result]


QUIET_S = 2.0
BETWEEN_LINES_S = 10.0


class Standing(NamedTuple):
    title: str
    num_bytes: int
    total_bytes: int | None
    num_rows: int


Show = Callable[[Standing | None], None]
"""Displays progress; None: it is over."""
_shows: list[Show] = []


@contextmanager
def shown_by(show: Show) -> Iterator[None]:
    """Progress inside it is displayed by `show` instead of standard error."""
    _shows.append(show)
    try:
        yield
    finally:
        _shows.remove(show)


def shower() -> Show | None:
    return _shows[-1] if _shows else None


class Bar:
    def __init__(self, console: Console) -> None:
        columns = TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[rows]:,} rows")
        self.progress = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)

    def draw(self, at: Standing) -> None:
        tasks = self.progress.tasks
        if not tasks or tasks[0].description != at.title:
            for task in tasks:
                self.progress.remove_task(task.id)
            self.progress.add_task(at.title, total=at.total_bytes, rows=at.num_rows)
        self.progress.update(self.progress.task_ids[0], completed=at.num_bytes, rows=at.num_rows)


class PreparingBar:
    """Shows on standard error how much of the sources is prepared."""

    def __init__(self, sources: Sequence[Source], clock: Callable[[], float] = time.monotonic) -> None:
        self._title = f"preparing {', '.join(source.name for source in sources)}"
        is_known = not any(source.is_on_hub or source.max_rows is not None for source in sources)
        self._total = sum(file.num_text_bytes for source in sources for file in source.files) if is_known else None
        self._clock, self._begun = clock, clock()
        self._done = self._num_rows = 0
        self._console = Console(stderr=True)
        self._bar: Bar | None = None
        self._last_line: float | None = None
        # A worker process is silent: its standard error is another program's log.
        self._is_silent = multiprocessing.parent_process() is not None

    def __enter__(self) -> PreparingBar:
        return self

    def advance(self, num_bytes: int, num_rows: int) -> None:
        self._done += num_bytes
        self._num_rows = num_rows
        now = self._clock()
        if self._is_silent or now - self._begun <= QUIET_S:
            return
        at = Standing(self._title, self._done, self._total, num_rows)
        if (show := shower()) is not None:
            show(at)
        elif self._console.is_terminal:
            if self._bar is None:
                self._bar = Bar(self._console)
                self._bar.progress.start()
            self._bar.draw(at)
        elif self._last_line is None or now - self._last_line >= BETWEEN_LINES_S:
            self._last_line = now
            share = f" ({min(self._done / self._total, 1):.0%})" if self._total and self._done else ""
            self._print(f"{counted(num_rows, 'row')}{share}")

    def _print(self, what: str) -> None:
        self._console.print(f"{self._title}: {what}", markup=False, highlight=False, soft_wrap=True)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if (show := shower()) is not None and not self._is_silent:
            show(None)
        if self._bar is not None:
            self._bar.progress.stop()
        if self._last_line is not None and kind is None:
            self._print(f"{counted(self._num_rows, 'row')} done in {self._clock() - self._begun:.0f} s")
