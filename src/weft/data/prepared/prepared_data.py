"""The data of jobs: from the cache if it was prepared before, else prepared now and cached."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from weft.data.chat.chat_template import Tokenizer
from weft.data.dataset import Dataset
from weft.data.prepared.cache import default_cache
from weft.data.prepared.convert import Converter
from weft.data.prepared.digests import FileDigests
from weft.data.prepared.key import prepared_key
from weft.data.prepared.prepare import prepare
from weft.data.prepared.settings import DataSettings
from weft.data.rows.column_map import ColumnMap
from weft.data.rows.find import find_source
from weft.data.rows.sources import Source
from weft.errors import DataError
from weft.spec.job import SourceSpec


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
