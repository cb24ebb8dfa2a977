"""Removes what was prepared of files that are gone: tenants who delete a file leave nothing of it on a worker.

A job's copy of a file is named by the file's id, and an entry of the cache by the files it was made of. An entry that
other files with the same contents use as well is made anew for them.
"""

from __future__ import annotations

import time
from pathlib import Path

import sqlalchemy as sa

from weft.data.prepared.cache import EntryInfo, PreparedCache
from weft.serve.blob_gc import file_is_needed
from weft.serve.db.engine import Database
from weft.serve.db.tables import FILES

EVERY_S = 60.0
FILE_ID = "file-"
"""How the ids of files begin."""


class PreparedGc:
    """Looks once a minute whether files are gone of which something is kept."""

    def __init__(self, database: Database, cache: PreparedCache | None) -> None:
        self._database, self._cache = database, cache
        self._due = 0.0

    def run_if_due(self) -> None:
        """Removes what has to go if the last time was a minute ago."""
        if self._cache is not None and time.monotonic() >= self._due:
            forget_deleted_files(self._database, self._cache)
            self._due = time.monotonic() + EVERY_S


def forget_deleted_files(database: Database, cache: PreparedCache) -> int:
    """Removes the entries of files that nobody needs any more; returns how many there were."""
    made_of = {file for entry in cache.entries() for file in _files(entry)}
    if not made_of:
        return 0
    with database.read() as tx:
        query = sa.select(FILES.c.id).where(FILES.c.id.in_(made_of), file_is_needed(tx))
        needed = set(tx.execute(query).scalars())
    return cache.forget(lambda entry: not needed.issuperset(_files(entry)))


def _files(entry: EntryInfo) -> list[str]:
    """The files of the service that an entry was made of; others may be in the same cache."""
    return [Path(source).stem for source in entry.sources if source.startswith(FILE_ID)]
